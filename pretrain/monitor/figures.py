"""Hold measured figures with their intervals, compare repeated runs, and write tables.

metrics.jsonl keeps the short names of figures; people read others.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import mean, stdev
from typing import TYPE_CHECKING, NamedTuple

from data_prep.messages import one_line

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


# numpy is imported where it is used: it takes a tenth of a second of every command.

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


class Compared(NamedTuple):
    """Hold a figure of repeated runs, and how it differs from that of the first entry."""

    runs: int
    mean: float
    deviation: float | None  # between runs; None if there is only one
    difference: Figure | None  # mean of the paired differences, 95 % interval; None of the first


def compare(values: Mapping[str, Mapping[str, float]]) -> dict[str, Compared]:
    """Compare a figure of several entries with that of the first one.

    Differences are paired: runs of the same seed share what the seed decides. The interval is
    Student's.

    Args:
        values: the figure by entry, and by seed.
    """
    found = {}
    first = next(iter(values.values()))
    for name, of_seed in values.items():
        own = list(of_seed.values())
        difference = None
        pairs = [of_seed[seed] - first[seed] for seed in of_seed if seed in first]
        if of_seed is not first and pairs:
            d = mean(pairs)
            difference = Figure(d)
            if len(pairs) > 1:
                s = stdev(pairs)
                half = student_t(len(pairs) - 1) * s / math.sqrt(len(pairs))
                difference = Figure(d, d - half, d + half)
        deviation = stdev(own) if len(own) > 1 else None
        found[name] = Compared(len(own), mean(own), deviation, difference)
    return found


def student_t(freedom: int) -> float:
    """Return the t that 95 % of Student's distribution are within."""
    import numpy as np

    # With t = sqrt(n) tan(a) the density of a is cos(a) ** (n - 1).
    angles = np.linspace(0, np.pi / 2, 100_001)
    density = np.cos(angles) ** (freedom - 1)
    below = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.sqrt(freedom) * math.tan(float(np.interp(0.95, below / below[-1], angles)))


def with_columns(
    rows: Iterable[tuple[str, Mapping[str, object]]],
) -> tuple[list[str], list[list[object]]]:
    """Return heads and cells of named rows; a figure that a row has not is empty."""
    rows = list(rows)
    columns = list(dict.fromkeys(column for _, row in rows for column in row))
    return ["", *columns], [[name, *(row.get(c, "") for c in columns)] for name, row in rows]


def markdown(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table of Markdown; nothing in a cell is markup."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(escaped(cell) for cell in line) + " |" for line in lines)


def escaped(value: object) -> str:
    """Escape Markdown: a source's name is any string of a user."""
    text = one_line(str(value))
    for character in "\\`|<>[]*_":
        text = text.replace(character, f"\\{character}")
    return text


def comma_separated(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a CSV, with numbers as they are; None is empty."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *rows])
    return text.getvalue()


FORMATS: dict[str, Callable[..., str]] = {
    "md": lambda columns, rows: markdown(columns, rows) + "\n",
    "csv": comma_separated,
}
