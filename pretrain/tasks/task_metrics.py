"""Measure classes and scores, fast enough for the thousand resamples of an interval.

Where a figure is not defined, for instance Pearson's correlation of a constant, it is 0: nothing
was found. Matthews' coefficient of a constant is 0 by its definition.

Shapes: R rows, C classes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def of_classes(labels: NDArray[np.int64], chosen: NDArray[np.int64], num: int) -> dict[str, float]:
    """Return accuracy, F1 and Matthews' correlation of the labels that were chosen [R].

    A choice of -1 is none. F1 is that of the second class where there are two, else the mean over
    all classes.
    """
    size, right = float(len(labels)), labels[labels == chosen]
    chosen = np.where(chosen < 0, num, chosen)
    given_C, chosen_C, right_C = (
        np.bincount(some, minlength=num + 1).astype(np.float64) for some in (labels, chosen, right)
    )
    # 0 of a class that does not occur.
    f1_C = (2 * right_C / np.maximum(given_C + chosen_C, 1))[:num]
    return {
        "accuracy": len(right) / size,
        "f1": float(f1_C[1] if num == 2 else f1_C.mean()),
        "mcc": matthews(given_C, chosen_C, len(right)),
    }


def matthews(given_C: Floats, chosen_C: Floats, right: float) -> float:
    """Return Matthews' correlation, of more than two classes Gorodkin's (2004).

    Args:
        given_C: how often each class is right.
        chosen_C: how often each is chosen.
        right: how often the right one is chosen.
    """
    size = given_C.sum()
    spread = (size**2 - given_C @ given_C) * (size**2 - chosen_C @ chosen_C)
    return float((right * size - given_C @ chosen_C) / np.sqrt(spread)) if spread else 0.0


def of_scores(scores: Floats, given: Floats) -> dict[str, float]:
    """Return Pearson's and Spearman's correlation of scores [R] with those of people."""
    finite = np.isfinite(scores).all()  # a model that diverged has found nothing
    if not finite or len(scores) < 2 or np.ptp(scores) == 0 or np.ptp(given) == 0:
        return {"pearson": 0.0, "spearman": 0.0}
    return {"pearson": pearson(scores, given), "spearman": spearman(scores, given)}


def pearson(x: Floats, y: Floats) -> float:
    """Return the correlation coefficient of two samples [R]."""
    x, y = x - x.mean(), y - y.mean()
    return float(x @ y / np.sqrt((x @ x) * (y @ y)))


def spearman(x: Floats, y: Floats) -> float:
    """Return the correlation coefficient of the ranks [R]; equal values share their mean rank."""
    once = np.ones(len(x))
    return pearson(ranks(places(x), once), ranks(places(y), once))


def places(values: Floats) -> NDArray[np.int64]:
    """Return the place [R] of each value among the different values in order."""
    found: NDArray[np.int64] = np.unique(values, return_inverse=True)[1]
    return found


def ranks(places: NDArray[np.int64], times: Floats) -> Floats:
    """Return the mean rank [R] of values at `places`, where each occurs so many `times` [R]."""
    counts = np.bincount(places, times)
    found: Floats = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return found
