"""Compare repeated runs, and write tables as Markdown and CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import mean, stdev
from typing import NamedTuple

import numpy as np

from data_prep.messages import one_line
from pretrain.monitor.figures import Figure


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
