"""Describe amounts of memory, keep what is freed, and recognise errors about too little of it."""

from __future__ import annotations

import ctypes
import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
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

    total: int  # of the device, or of a limit below it
    free: int  # of them, still to be allocated


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
    trim_threshold, mmap_threshold, mmap_max = -1, -3, -4  # of glibc's malloc.h
    libc.mallopt(mmap_max, 0)
    libc.mallopt(trim_threshold, -1)
    try:
        yield
    finally:  # the defaults; the thresholds as they are after a large block was freed
        libc.mallopt(mmap_max, 65536)
        libc.mallopt(mmap_threshold, 32 << 20)
        libc.mallopt(trim_threshold, 64 << 20)
        libc.malloc_trim(0)
