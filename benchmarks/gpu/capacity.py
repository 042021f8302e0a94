"""The largest micro-batch that fits a smaller card's memory, ours and the usual step's.

A cap is on what torch's allocator may take, in units of 10^9 bytes: a card sold as 16 GB has 16.9,
and the rest is left for the driver and the libraries. AdamW's moments are in memory as they are in
training, and the student's gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.gpu.plan import capacities
from benchmarks.gpu.supervise import Answer
from benchmarks.gpu.timings import runs
from benchmarks.gpu.variants import Subjects, free
from pretrain.bench.measure import Step
from pretrain.kernels.head import Backend

PRECISION = "fp16"  # what a V100 has
_MOST = 1 << 14


def largest(fits: Callable[[int], bool], start: int = 1, *, share: float = 1 / 32) -> int:
    """The largest number that `fits`, at most `share` of it too small; 0 if 1 does not.

    Whatever is smaller than one that fits does, too. `start` is a first guess.
    """
    low, high = 0, max(1, start)
    while fits(high):
        low, high = high, 2 * high
        if low >= _MOST:
            return low
    while high - low > max(1, int(low * share)):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def micro_batches(subjects: Subjects, cap: int, head: Backend) -> Iterator[Answer]:
    """The rows `capacity/CAP GB/...`: ours, the usual step's, and how many times as many."""
    folder = f"capacity/{cap} GB"
    device = subjects.device
    total = torch.cuda.get_device_properties(device).total_memory
    if cap * 10**9 > total:
        for what in (*capacities(cap), "ratio"):
            yield Answer(f"{folder}/{what}", None, f"this GPU has {total / 1e9:.1f} GB")
        return
    moments = [torch.zeros_like(p) for p in subjects.student.parameters() for _ in range(2)]
    free()
    torch.cuda.set_per_process_memory_fraction(cap * 10**9 / total, device)
    found: dict[str, int] = {}
    try:
        ours = partial(subjects.ours, head=head)
        makers: dict[str, Callable[[str, str, int], Step]] = {"usual": subjects.usual, "ours": ours}
        makers["ours, checkpointing"] = partial(ours, checkpointing=True)
        # Guesses; a bad one only costs a few tries more.
        guesses = {"usual": cap // 2, "ours": 6 * cap, "ours, checkpointing": 18 * cap}
        for what in capacities(cap):
            subjects.keep_teacher(PRECISION if what != "usual" else "fp32")
            free()
            found[what] = largest(partial(_fits, makers[what]), guesses[what])
            yield Answer(f"{folder}/{what}", found[what])
    finally:
        del moments
        subjects.keep_teacher("fp32")
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        free()
    if found["usual"]:
        yield Answer(f"{folder}/ratio", found["ours"] / found["usual"])
    else:
        yield Answer(f"{folder}/ratio", None, "the usual step fits at no micro-batch")


def _fits(make: Callable[[str, str, int], Step], rows: int) -> bool:
    try:
        step = make(PRECISION, "all", rows)
    except torch.OutOfMemoryError:
        return False
    return runs(step)
