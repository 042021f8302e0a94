"""Measure classes and scores with scikit-learn and scipy.

Where a figure is not defined, for instance Pearson's correlation of a constant, it is 0: nothing
was found. Matthews' coefficient of a constant is 0 by its definition.

Shapes: R rows, C classes.
"""

from __future__ import annotations

import warnings

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def of_classes(labels: NDArray[np.int64], chosen: NDArray[np.int64], num: int) -> dict[str, float]:
    """Return accuracy, F1 and Matthews' correlation of the labels that were chosen [R].

    F1 is that of the second class where there are two, else the mean over all classes.
    """
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    binary = num == 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of resamples with one class
        f1 = f1_score(
            labels,
            chosen,
            labels=[1] if binary else range(num),
            average="macro",
            zero_division=0,
        )
        found = {
            "accuracy": float(accuracy_score(labels, chosen)),
            "f1": float(f1),
            "mcc": float(matthews_corrcoef(labels, chosen)),
        }
    return {name: value if np.isfinite(value) else 0.0 for name, value in found.items()}


def of_scores(scores: Floats, given: Floats) -> dict[str, float]:
    """Return Pearson's and Spearman's correlation of scores [R] with those of people."""
    from scipy.stats import pearsonr, spearmanr

    finite = np.isfinite(scores).all()  # a model that diverged has found nothing
    if not finite or len(scores) < 2 or np.ptp(scores) == 0 or np.ptp(given) == 0:
        return {"pearson": 0.0, "spearman": 0.0}
    return {
        "pearson": float(pearsonr(scores, given).statistic),
        "spearman": float(spearmanr(scores, given).statistic),
    }
