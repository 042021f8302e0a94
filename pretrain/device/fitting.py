"""Find the largest micro-batch within a memory budget, without torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pretrain.device.memory import out_of_memory


class Found(NamedTuple):
    """Hold a micro-batch that fits."""

    rows: int
    used: float  # bytes


def sizes(share: int, most: int | None = None) -> list[int]:
    """Return the possible micro-batch sizes, ascending: the divisors of a rank's `share`."""
    return [n for n in range(1, min(share, most or share) + 1) if share % n == 0]


def largest(
    sizes: Sequence[int], measure: Callable[[int], float], budget: float, *, multiple: int = 1
) -> Found | None:
    """Return the largest of `sizes` whose memory is within the budget, or None.

    Memory grows with the rows, so halving the list finds it: 4,096 rows have 13 divisors, which
    take at most four measurements.

    Args:
        sizes: ascending.
        measure: rows -> bytes; an out-of-memory error means that they do not fit.
        budget: bytes.
        multiple: a multiple of this is taken instead if it is at least 3/4 as large.
    """
    used: dict[int, float] = {}
    low, high = -1, len(sizes)  # sizes[low] fits, sizes[high] does not
    while high - low > 1:
        middle = (low + high) // 2
        rows = sizes[middle]
        used[rows] = measured(measure, rows)
        low, high = (middle, high) if used[rows] <= budget else (low, middle)
    if low < 0:
        return None
    rows = sizes[low]
    # Matrix units prefer multiples, but not at the price of many rows.
    even = [n for n in sizes if n <= rows and 3 * rows <= 4 * n and n % multiple == 0]
    rows = even[-1] if even else rows
    return Found(rows, used[rows] if rows in used else measured(measure, rows))


def measured(measure: Callable[[int], float], rows: int) -> float:
    """Return the bytes that so many rows take; infinite if memory ran out."""
    try:
        return measure(rows)
    except Exception as error:
        if not out_of_memory(error):
            raise
        return math.inf
