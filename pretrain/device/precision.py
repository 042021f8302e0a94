"""`precision: auto` and the default of `micro_batch_size`: chosen by the hardware's kind.

No clock is asked: a machine chooses the same at every start. What was chosen is part of the run: it
stands in `config.json` and in every checkpoint, and a run that continues keeps it. A run in fp16
therefore continues on GPUs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from pretrain import RunError
from pretrain.config import RunConfig

CPUINFO = Path("/proc/cpuinfo")
ROWS_ON_HOST = 8  # the most rows of a run on CPUs that gives no `micro_batch_size`


def choose(device: torch.device) -> tuple[str, str]:
    """Return what `auto` means on a device, and by what it was chosen.

    bf16 where the hardware multiplies it faster than fp32: on a GPU from compute capability 8.0
    on, on a CPU with AMX or an AMD one with AVX512-BF16 (Intel's without AMX are slower in bf16).
    fp16 on GPUs that have matrix units for it alone (7.0 and 7.5); fp32 on everything else.
    """
    if device.type == "cuda" and torch.version.cuda:
        major, minor = torch.cuda.get_device_capability(device)
        name = f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
        return "bf16" if major >= 8 else "fp16" if major == 7 else "fp32", name
    if device.type != "cpu":
        return "fp32", f"not known of {device.type}"
    vendor, flags = _cpu()
    if {"amx_bf16", "amx_tile"} <= flags:
        return "bf16", "CPU with AMX"
    if vendor == "AuthenticAMD" and "avx512_bf16" in flags:
        return "bf16", "AMD CPU with AVX512-BF16"
    return "fp32", "CPU without AMX or AMD's AVX512-BF16"


def resolve(
    config: RunConfig,
    device: torch.device,
    state: Mapping[str, Any] | None,
    say: Callable[[str], None],
) -> RunConfig:
    """Replace `precision: auto` by the checkpoint's precision, or in a new run by `choose`.

    Args:
        config: the run.
        device: this process's.
        state: of the checkpoint that is continued.
        say: is told the precision, and if this machine would choose another.
    """
    if config.train.precision != "auto":
        return config
    precision, reason = choose(device)
    text = f"{precision} ({reason})"
    recorded = (state or {}).get("shaping", {}).get("train", {}).get("precision")
    if recorded in ("fp32", "bf16", "fp16"):
        chosen, precision = precision, recorded
        if precision == "fp16" and device.type != "cuda":
            raise RunError(
                f"{config.output}: its checkpoint was made in fp16, which needs a CUDA GPU, and "
                f"this is {device.type}; continue it on a GPU, or set another `output:`"
            )
        text = f"{precision}, as in the checkpoint"
        if chosen != precision:
            text += f"; this machine would choose {chosen} ({reason})"
    say(f"precision auto: {text}")
    return _with(config, precision=precision)


def with_defaults(config: RunConfig, device: str, num_processes: int) -> RunConfig:
    """Fill in `micro_batch_size`: left out, it is `auto` on a GPU; there `auto` is resolved later.

    On a CPU both are the largest number of rows, up to 8, that divides a rank's share: more are
    hardly faster there, and a system that runs out of memory kills the process.
    """
    if isinstance(config.train.micro_batch_size, int) or (
        device == "cuda" and config.train.micro_batch_size == "auto"
    ):
        return config
    share = config.train.global_batch_size // num_processes
    rows = next(rows for rows in range(ROWS_ON_HOST, 0, -1) if share % rows == 0)
    return _with(config, micro_batch_size="auto" if device == "cuda" else rows)


def allow_tf32(device: torch.device) -> None:
    """Let a GPU multiply fp32 on its matrix units, which round factors to 10 bits (TF32)."""
    if device.type == "cuda":  # on a CPU the same setting would change oneDNN's products
        torch.set_float32_matmul_precision("high")


def _cpu() -> tuple[str, set[str]]:
    """Vendor and flags as Linux names them; nothing on another system."""
    try:
        text = CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", set()
    lines = [line.partition(":") for line in text.partition("\n\n")[0].splitlines()]
    fields = {key.strip(): value.strip() for key, _, value in lines}
    return fields.get("vendor_id", ""), set(fields.get("flags", "").split())


def _with(config: RunConfig, **changes: Any) -> RunConfig:
    train = config.train.model_copy(update=changes)
    return config.model_copy(update={"train": train})
