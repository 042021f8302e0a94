"""Describe amounts of memory, keep what is freed, and recognise errors about too little of it."""

from __future__ import annotations

import ctypes
import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

if TYPE_CHECKING:
    import torch

# Matches the messages of torch, CUDA, Python and the system.
OUT_OF_MEMORY = (
    r"out of memory|OutOfMemoryError|MemoryError|bad_alloc|STATUS_ALLOC_FAILED"
    r"|(can't|cannot|unable to) allocate (\S+ )?memory"
)


class Memory(NamedTuple):
    """Hold amounts of memory in bytes."""

    total: int  # bytes of the device, or a limit below that
    free: int  # bytes that can still be allocated


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out, on a GPU or on the host."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError):  # torch raises it without a type of its own in places
        return bool(re.search(OUT_OF_MEMORY, str(error), re.IGNORECASE))
    return isinstance(error, MemoryError)


def in_use(device: torch.device) -> int:
    """Return the bytes that this process holds, or the most that tensors took of a GPU."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    return psutil.Process().memory_info().rss


def allocated(work: Callable[[], object], device: torch.device) -> tuple[int, int]:
    """Return the most bytes of tensors while `work` runs, and those that its result holds alive.

    Both are above what was alive before. A GPU's allocator counts them, on a CPU torch's profiler.
    """
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)  # device sync: earlier work must not count
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = work()
        peak, left = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
        del result
        return peak - before, left - before
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profiler:
        result = work()
    del result
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    alive = [0, *accumulate(change for _, change in changes)]
    return max(alive), alive[-1]


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Make glibc keep what is freed inside the block; elsewhere do nothing.

    By default glibc returns each tensor of more than 32 MB to the system, so each gradient of the
    embeddings and each tile of logits begins with new pages. These take up to a fifth of the time
    of a step on CPUs (docs/performance.md).
    """
    libc: Any = ctypes.CDLL(None) if os.name == "posix" else None
    if not hasattr(libc, "mallopt"):
        yield
        return
    trim_threshold, mmap_threshold, mmap_max = -1, -3, -4  # constants of glibc's malloc.h
    libc.mallopt(mmap_max, 0)
    libc.mallopt(trim_threshold, -1)
    try:
        yield
    finally:  # the defaults; the thresholds as they are after a large block was freed
        libc.mallopt(mmap_max, 65536)
        libc.mallopt(mmap_threshold, 32 << 20)
        libc.mallopt(trim_threshold, 64 << 20)
        libc.malloc_trim(0)
