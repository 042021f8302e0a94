"""Describe amounts of memory, and recognise errors about too little of it."""

from __future__ import annotations

import ctypes
import errno
import re
import sys
from typing import NamedTuple

# Matches the messages of torch, CUDA, Python and the system.
OUT_OF_MEMORY = (
    r"out of memory|OutOfMemoryError|MemoryError|bad_alloc|STATUS_ALLOC_FAILED"
    r"|(can't|cannot|unable to) allocate (\S+ )?memory"
)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


class Memory(NamedTuple):
    """Hold amounts of memory in bytes."""

    total: int  # of the device, or of a limit below it
    free: int  # of them, still to be allocated


def keep_large_blocks() -> None:
    """Make malloc keep freed blocks, as it does by itself in a process that prepared no corpus.

    `distil prepare` makes it return every block of a mebibyte. A training step in the same process
    then waits for new pages: the demo trained at half the speed.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
        if mallopt is not None:
            # The ceilings that glibc's own adjustment reaches.
            mallopt(_M_MMAP_THRESHOLD, 2**25)
            mallopt(_M_TRIM_THRESHOLD, 2**26)


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out, on a GPU or on the host."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError):  # torch raises it without a type of its own in places
        return bool(re.search(OUT_OF_MEMORY, str(error), re.IGNORECASE))
    return isinstance(error, MemoryError)
