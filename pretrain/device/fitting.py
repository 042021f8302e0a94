"""Find the largest micro-batch within a memory budget, with few measurements and without torch."""

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

    Memory grows with the rows in nearly a straight line. So few sizes are measured: the two
    smallest, then the one where the line through the last two reaches the budget.

    Args:
        sizes: ascending.
        measure: rows -> bytes; an out-of-memory error means that they do not fit.
        budget: bytes.
        multiple: a multiple of this is taken instead if it is at least 3/4 as large.
    """
    fits: list[Found] = []
    low, high, over = -1, len(sizes), math.inf  # sizes[low] fits, sizes[high] takes `over`
    guess: int | None = 0
    while guess is not None:
        used = measured(measure, sizes[guess])
        # Keep the invariant: sizes[low] fits, sizes[high] does not.
        if used <= budget:
            low, fits = guess, [*fits, Found(sizes[guess], used)]
        else:
            high, over = guess, used
        beyond = [Found(sizes[high], over)] if high < len(sizes) else []
        guess = _next(sizes[low + 1 : high], fits, beyond, budget)
        guess = None if guess is None else low + 1 + guess
    if not fits:
        return None
    rows = sizes[low]
    # Matrix units prefer multiples, but not at the price of many rows.
    rounded = [n for n in sizes if n <= rows and n % multiple == 0]
    if rounded and 4 * rounded[-1] >= 3 * rows:
        rows = rounded[-1]
    return Found(rows, _line(fits, rows))


def _next(
    between: Sequence[int], fits: Sequence[Found], beyond: Sequence[Found], budget: float
) -> int | None:
    """Return the index of the size to measure next, or None.

    The sizes `between` lie above the largest that fits and below the smallest that does not.
    """
    if not between or not fits:
        return None
    points = [*fits, *(point for point in beyond if point.used < math.inf)][-2:]
    if len(points) == 1 and not beyond:
        return 0  # a line needs a second point
    if len(points) == 2:
        reached = [i for i, n in enumerate(between) if _line(points, n) <= budget]
        # By the line, not even the smallest size between fits.
        if not reached:
            return None
        if not (beyond and len(reached) == len(between)):
            return reached[-1]
    return len(between) // 2  # the line was wrong: halve the interval


def _line(points: Sequence[Found], rows: int) -> float:
    """Return the bytes of so many rows, on the line through the last two points."""
    if len(points) == 1:
        return points[0].used
    (x, y), (x2, y2) = points[-2:]
    return y + (y2 - y) / (x2 - x) * (rows - x)


def measured(measure: Callable[[int], float], rows: int) -> float:
    """Return the bytes that so many rows take; infinite if memory ran out."""
    try:
        return measure(rows)
    except Exception as error:
        if not out_of_memory(error):
            raise
        return math.inf
