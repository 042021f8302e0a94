"""Define all precisions in one table, and choose the one that `train.precision: auto` means.

The choice depends on the kind of hardware and needs no measurement, so a machine chooses the same
at every start. It is part of the run: `config.json` and every checkpoint hold it, and a resumed
run keeps it. A run in fp16 therefore continues on GPUs only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pretrain import RunError
from pretrain.kernels.products import processor

if TYPE_CHECKING:
    import torch  # at run time inside functions: a config must load without it


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Hold all that a value of `train.precision` means."""

    torch_name: str  # dtype of forward passes; weights and optimizer state stay in fp32
    accelerate: str  # Accelerate's `mixed_precision`
    # The same under DeepSpeed, which would round the weights to bf16; autocast keeps them in fp32.
    deepspeed: str
    gpu: int  # major compute capability from which a GPU is faster in it
    scaled: bool = False  # it needs a loss scale, which Accelerate has only for CUDA
    # Of a benchmark's step. Without one, fp16 gradients of a mean vanish. Much more overflows with
    # drawn weights, whose gradients are larger than those of trained ones.
    loss_scale: float = 1.0
    tolerances: tuple[float, float]  # largest relative difference of a term, and of a gradient

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of forward passes."""
        import torch

        dtype: torch.dtype = getattr(torch, self.torch_name)
        return dtype

    def autocast(self, device: torch.device) -> torch.autocast:
        """Return the context of a forward pass; it changes nothing in fp32."""
        import torch

        half = self.dtype if self.dtype != torch.float32 else None
        return torch.autocast(device.type, half, enabled=half is not None)


PRECISIONS = {
    "fp32": Precision(
        torch_name="float32", accelerate="no", deepspeed="no", gpu=0, tolerances=(1e-5, 1e-4)
    ),
    "bf16": Precision(
        torch_name="bfloat16", accelerate="bf16", deepspeed="no", gpu=8, tolerances=(2e-2, 2e-2)
    ),
    "fp16": Precision(
        torch_name="float16",
        accelerate="fp16",
        deepspeed="fp16",
        gpu=7,
        scaled=True,
        loss_scale=2.0**10,
        tolerances=(2e-2, 2e-2),
    ),
}

_NAMES = ("auto", *PRECISIONS)
if TYPE_CHECKING:
    PrecisionName = str  # mypy takes no Literal of a table's keys
else:
    PrecisionName = Literal[_NAMES]


def check_precision(name: str, device: str) -> None:
    """Refuse a precision that needs a loss scale where there is none.

    Raises:
        RunError: names the others.
    """
    if PRECISIONS[name].scaled and device != "cuda":
        others = " or ".join(sorted(known for known, p in PRECISIONS.items() if not p.scaled))
        raise RunError(f"train.precision {name} needs a CUDA GPU, this is {device}; use {others}")


def choose(device: torch.device) -> tuple[str, str]:
    """Return what `auto` means on a device, and the reason.

    bf16 where the hardware multiplies it faster than fp32: on a GPU from compute capability 8.0
    on, on a CPU with AMX or an AMD one with AVX512-BF16 (Intel's without AMX are slower in bf16).
    fp16 on GPUs whose matrix units have nothing else (7.0 and 7.5); fp32 on everything else.
    """
    import torch

    if device.type == "cuda" and torch.version.cuda:
        major, minor = torch.cuda.get_device_capability(device)
        faster = {name: p.gpu for name, p in PRECISIONS.items() if p.gpu <= major}
        name = f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
        return max(faster, key=faster.__getitem__), name
    if device.type != "cpu":
        return "fp32", f"not known of {device.type}"
    vendor, flags = processor()
    if {"amx_bf16", "amx_tile"} <= flags:
        return "bf16", "CPU with AMX"
    if vendor == "AuthenticAMD" and "avx512_bf16" in flags:
        return "bf16", "AMD CPU with AVX512-BF16"
    return "fp32", "CPU without AMX or AMD's AVX512-BF16"


def allow_tf32(device: torch.device) -> None:
    """Let a GPU compute fp32 products in TF32, which rounds factors to 10 bits."""
    import torch

    if device.type == "cuda":  # on a CPU the same setting would change oneDNN's products
        torch.set_float32_matmul_precision("high")
