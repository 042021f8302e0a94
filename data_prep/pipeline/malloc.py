"""Tell glibc's malloc when to return freed memory."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # constants of glibc's malloc.h


def return_large_blocks() -> None:
    """Make malloc return every block of a mebibyte or more when it is freed.

    glibc raises its threshold to 32 MiB over time, and long texts of different sizes then fragment
    the heap: 550 MB after a gigabyte of text, compared with 130. Other systems are left alone.
    """
    _set_malloc({_M_MMAP_THRESHOLD: 2**20})


def keep_large_blocks() -> None:
    """Make malloc keep freed blocks again, up to the ceilings of glibc's own adjustment.

    A run in a process that has prepared a corpus waits for new pages in each step otherwise: the
    demo trained at half the speed.
    """
    _set_malloc({_M_MMAP_THRESHOLD: 2**25, _M_TRIM_THRESHOLD: 2**26})


def _set_malloc(values: Mapping[int, int]) -> None:
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
        if mallopt is not None:
            for parameter, value in values.items():
                mallopt(parameter, value)
