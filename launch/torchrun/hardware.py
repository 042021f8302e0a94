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
    """Hold a preset.

    A GPU's rate is what a record of docs/results has; where there is none, it lies between what a
    roofline of the step allows and what DistilBERT's authors report: 90 hours on eight V100.
    """

    name: str
    device: Device
    processes: int  # on each node
    precision: str
    micro_batch_size: int | Literal["auto"]
    rate: float  # FLOP/s of a process, of a CPU of a core: docs/performance.md
    slow: float  # the least; `rate` where it was measured
    memory: float = 0.0  # bytes of a GPU; of a CPU those of this machine count

    @property
    def measured(self) -> bool:
        """Return whether the rate is that of a record, or of a CPU."""
        return self.slow == self.rate

    def overrides(self, given: Sequence[str]) -> list[str]:
        """Return the preset as overrides, without the keys that the user has given."""
        keys = {override.partition("=")[0].strip() for override in given}
        asked = {"precision": self.precision, "micro_batch_size": self.micro_batch_size}
        return [f"train.{k}={value}" for k, value in asked.items() if f"train.{k}" not in keys]


_AUTHORS = 0.02  # the share of a data sheet's FLOP/s that 90 hours for 3.3 billion tokens are
# FLOP/s at best and at worst, in half precision.
_V100 = 0.33 * 125e12, _AUTHORS * 125e12
_A100 = 0.49 * 312e12, _AUTHORS * 312e12
_H100 = 0.33 * 989e12, _AUTHORS * 989e12
_H200 = 0.24 * 989e12, 0.24 * 989e12  # measured: docs/results/step-gpu.json


def _gpu(
    name: str, processes: int, precision: str, rates: tuple[float, float], gigabytes: int
) -> Hardware:
    return Hardware(name, "cuda", processes, precision, "auto", *rates, memory=gigabytes * 1e9)


# For DistilBERT's size and rows of 512 tokens. A CPU process takes 6.1 GB; on a GPU `auto` finds
# how many rows fit.
PRESETS = (
    Hardware("cpu", "cpu", processes=1, precision="fp32", micro_batch_size=8, rate=8e10, slow=8e10),
    _gpu("1xv100-16gb", 1, "fp16", _V100, 16),
    _gpu("8xv100-16gb", 8, "fp16", _V100, 16),
    _gpu("8xv100-32gb", 8, "fp16", _V100, 32),
    _gpu("a100", 8, "bf16", _A100, 40),
    _gpu("8xa100-80gb", 8, "bf16", _A100, 80),
    _gpu("h100", 1, "bf16", _H100, 80),
    _gpu("8xh100", 8, "bf16", _H100, 80),
    _gpu("h200", 1, "bf16", _H200, 141),
    _gpu("8xh200", 8, "bf16", _H200, 141),
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
    num, _, kind = name.partition("x")
    nodes = ""
    if num.isdecimal() and int(num) % 8 == 0 and any(p.name == f"8x{kind}" for p in PRESETS):
        nodes = f"; so many are --nodes {int(num) // 8} --hardware 8x{kind}"
    raise RunError(f"--hardware {name}: not known: one of {PRESET_NAMES}{nodes}")
