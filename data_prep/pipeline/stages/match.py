"""A slice of the hash space -> the pairs of duplicates in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.config import Level
from data_prep.duplicates.dedup import pairs, similar


@dataclass(frozen=True, slots=True)
class MatchTask:
    """One slice of `slices`, for the items of all units of extraction; `level` is their kind.

    `bounds`: the number of each unit's first item, and of all items.
    """

    level: str
    how: Level
    threshold: float
    folders: tuple[Path, ...]
    bounds: tuple[int, ...]
    slice_number: int
    slices: int


def match(task: MatchTask, folder: Path) -> dict[str, Any]:
    """Write `exact.npy` and `near.npy`: pairs of items [n, 2]."""
    slice_of = (task.slice_number, task.slices)
    exact = pairs(task.folders, task.bounds, f"{task.level}-texts", *slice_of)
    near = np.empty((0, 2), dtype=np.int64)
    if task.how == "near":
        candidates = pairs(task.folders, task.bounds, f"{task.level}-bands", *slice_of)
        near = similar(task.folders, task.bounds, task.level, candidates, task.threshold)
    np.save(folder / "exact.npy", exact)
    np.save(folder / "near.npy", near)
    return {"exact": len(exact), "near": len(near)}
