"""Define presets of `--hardware`: processes, precision and micro-batch of a node."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pretrain import RunError

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Hardware:
    """Hold a preset; the values of one that is not `tried` are guesses."""

    name: str
    device: Device
    processes: int  # on each node
    precision: str
    micro_batch_size: int | Literal["auto"]
    rate: float  # FLOP/s of a process, of a CPU of a core: docs/performance.md
    memory: float = 0.0  # bytes of a GPU; of a CPU those of this machine count
    tried: bool = False

    def overrides(self, given: Sequence[str]) -> list[str]:
        """Return the preset as overrides, without the keys that the user has given."""
        keys = {override.partition("=")[0].strip() for override in given}
        asked = {"precision": self.precision, "micro_batch_size": self.micro_batch_size}
        return [f"train.{k}={value}" for k, value in asked.items() if f"train.{k}" not in keys]


# For DistilBERT's size and rows of 512 tokens. A CPU process takes 6.1 GB; on a GPU `auto` finds
# how many rows fit. The GPU presets are untried starting points.
PRESETS = (
    Hardware(
        "cpu", "cpu", processes=1, precision="fp32", micro_batch_size=8, rate=8e10, tried=True
    ),
    Hardware(
        "1xv100-16gb", "cuda", 1, "fp16", micro_batch_size="auto", rate=0.33 * 125e12, memory=16e9
    ),
    Hardware(
        "8xv100-16gb", "cuda", 8, "fp16", micro_batch_size="auto", rate=0.33 * 125e12, memory=16e9
    ),
    Hardware("8xv100-32gb", "cuda", 8, "fp16", "auto", rate=0.33 * 125e12, memory=32e9),
    Hardware("a100", "cuda", 8, "bf16", micro_batch_size="auto", rate=0.49 * 312e12, memory=40e9),
    Hardware("8xa100-80gb", "cuda", 8, "bf16", "auto", rate=0.49 * 312e12, memory=80e9),
    Hardware("h100", "cuda", 1, "bf16", micro_batch_size="auto", rate=0.33 * 989e12, memory=80e9),
    Hardware("8xh100", "cuda", 8, "bf16", "auto", rate=0.33 * 989e12, memory=80e9),
    Hardware("h200", "cuda", 1, "bf16", micro_batch_size="auto", rate=0.33 * 989e12, memory=141e9),
    Hardware("8xh200", "cuda", 8, "bf16", "auto", rate=0.33 * 989e12, memory=141e9),
)
PRESET_NAMES = ", ".join(preset.name for preset in PRESETS)


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux: fewer under taskset, Slurm and containers
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def hardware(name: str) -> Hardware:
    """Return the preset of that name; RunError lists the known ones."""
    for preset in PRESETS:
        if preset.name == name:
            return preset
    raise RunError(f"--hardware {name}: not known: one of {PRESET_NAMES}")
