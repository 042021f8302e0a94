"""Hold measured figures with their intervals, and name figures for people.

metrics.jsonl keeps the short names.
"""

from __future__ import annotations

import math
from typing import NamedTuple

_TERMS = {
    "cosine": "1 - cos",  # the term is a distance: 0 is best
    "loss": "weighted loss",  # what training minimises
}
_OF_HEAD = {"loss": "masked cross-entropy"}  # of validation, where an LM head is trained


def label(name: str, *, of_head: bool = False) -> str:
    """Return the name of a figure; with `of_head` of validation figures of an LM head."""
    return (_OF_HEAD if of_head else _TERMS).get(name, name)


class Figure(NamedTuple):
    """Hold a measured value with its 95 % interval; None where there is none."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def margin(self) -> float | None:
        """Return the larger distance of the value from an end of its interval."""
        if self.low is None or self.high is None:
            return None
        return max(self.high - self.value, self.value - self.low)

    def __str__(self) -> str:
        if self.margin is None:
            return f"{self.value:,.3f}"
        return f"{self.value:.3f} \u00b1{self.margin:.3f}"


def share(value: float, count: float) -> Figure:
    """Return a share of `count` independent items with the interval of the normal distribution."""
    half = 1.96 * math.sqrt(max(value * (1 - value), 0.0) / max(count, 1.0))
    return Figure(value, max(value - half, 0.0), min(value + half, 1.0))
