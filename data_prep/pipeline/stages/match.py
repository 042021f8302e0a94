"""Find the pairs of duplicates in a slice of the hash space."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data_prep.config import Level
from data_prep.duplicates.dedup import pairs, similar
from data_prep.duplicates.minhash import NUM_BANDS
from data_prep.pipeline.units import Planned, Stage

if TYPE_CHECKING:
    from data_prep.pipeline.plan import Plan

HASHES_AT_ONCE = 2_000_000  # 24 bytes each, and as much again to sort them


@dataclass(frozen=True, slots=True)
class MatchTask:
    """Hold one of `slices` slices, for the items (`level`) of all units of extraction.

    `bounds`: the number of each unit's first item, and of all items.
    """

    level: str
    how: Level
    threshold: float
    folders: tuple[Path, ...]
    bounds: tuple[int, ...]
    slice_number: int
    slices: int


def item_bounds(plan: Plan, level: str) -> tuple[int, ...]:
    """Return the number of each extracted unit's first item, and of all items."""
    counts = [
        sum(part["documents"] for part in record.result["parts"])
        if level == "documents"
        else record.result["paragraphs"]
        for record in plan.records("extract")
    ]
    return tuple(np.cumsum([0, *counts]).tolist())


def _plan(plan: Plan) -> Iterator[Planned]:
    """Yield a unit for each slice of the hashes of each level that is deduplicated."""
    settings = plan.config.deduplicate
    levels: list[tuple[str, Level]] = [
        ("documents", settings.documents),
        ("paragraphs", settings.paragraphs),
    ]
    folders, upstream = plan.folders("extract"), (plan.digest("extract"),)
    for level, how in levels:
        if how == "none":
            continue
        bounds = item_bounds(plan, level)
        hashes = bounds[-1] * (NUM_BANDS if how == "near" else 1)
        slices = max(1, -(-hashes // HASHES_AT_ONCE))
        for number in range(slices):
            keys = {
                "level": level,
                "how": how,
                "threshold": settings.threshold if how == "near" else None,
                "slice": [number, slices],
            }
            task = MatchTask(level, how, settings.threshold, folders, bounds, number, slices)
            yield Planned(task, keys, upstream)


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


STAGE = Stage("match", _plan, match, reads={"extract": ("documents-*", "paragraphs-*")})
