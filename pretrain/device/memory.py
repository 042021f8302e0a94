"""Describe amounts of memory, and recognise errors about too little of it."""

from __future__ import annotations

import errno
import re
from typing import NamedTuple

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
