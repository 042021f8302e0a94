"""Hold measured figures with their intervals, and name figures for people.

metrics.jsonl keeps the short names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

# numpy and pyarrow take a tenth of a second, which each process of `distil prepare` would wait for.
if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RESAMPLES = 1000  # draws of a bootstrap
# Figures of a line of training that the machine and the hour decide.
RATES = ("time", "elapsed", "memory", "tokens_per_second", "data_wait", "cpu_seconds")

_TERMS = {
    "cosine": "1 - cos",  # the term is a distance: 0 is best
    "loss": "weighted loss",  # what training minimises
    "majority": "accuracy of the most frequent class alone",
    "mcc": "Matthews' correlation",
}
_OF_HEAD = {"loss": "masked cross-entropy"}  # the name in validation, where an LM head is trained


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
            return f"{self.value:,}" if isinstance(self.value, int) else f"{self.value:,.3f}"
        return f"{self.value:.3f} \u00b1{self.margin:.3f}"


def share(value: float, count: float) -> Figure:
    """Return a share of `count` independent items with its interval (Wilson 1927)."""
    more = 1.96**2 / max(count, 1.0)
    middle = (value + more / 2) / (1 + more)
    half = math.sqrt(max(value * (1 - value), 0.0) * more + more**2 / 4) / (1 + more)
    return Figure(value, min(middle - half, value), max(middle + half, value))


def resamples(size: int) -> Iterator[NDArray[np.int64]]:
    """Yield the places [size] that each resample of a bootstrap draws, the same at every call."""
    import numpy as np

    draw = np.random.default_rng(0)
    for _ in range(RESAMPLES):
        yield draw.integers(size, size=size)


def interval(value: float, drawn: Sequence[float] | NDArray[np.float64]) -> Figure:
    """Return a value with the middle 95 % of its resamples; the value lies inside.

    A resample in which the figure is not defined is NaN, and is left out.
    """
    import numpy as np

    if np.isnan(drawn).all():
        return Figure(value)
    low, high = np.nanpercentile(drawn, [2.5, 97.5])
    return Figure(value, min(float(low), value), max(float(high), value))
