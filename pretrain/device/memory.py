"""Amounts of memory, and the errors that say there was too little."""

from __future__ import annotations

import errno
import re
from typing import NamedTuple

# In the texts of torch's, CUDA's, Python's and the system's errors.
OUT_OF_MEMORY = (
    r"out of memory|OutOfMemoryError|MemoryError|bad_alloc|STATUS_ALLOC_FAILED"
    r"|(can't|cannot|unable to) allocate (\S+ )?memory"
)


class Memory(NamedTuple):
    """Bytes."""

    total: int  # that there are, or that a limit leaves
    free: int  # of them, for what is still to be allocated


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory could not be had, on a GPU or on the host."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError):  # torch's, also where it names no type of its own
        return bool(re.search(OUT_OF_MEMORY, str(error), re.IGNORECASE))
    return isinstance(error, MemoryError)
