"""Decide from all pairs which documents are kept, their split, and which paragraphs are removed.

A cluster of duplicates keeps its first document. The smallest hash of its texts decides its split,
so that no duplicate of a training text is in the validation split. A document that has alone more
text than `validation` asks for is trained on, unless the smaller ones have too little text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from data_prep.duplicates.dedup import chunk_files, clusters, draw
from data_prep.pipeline.stages.documents import read_index
from data_prep.pipeline.stages.match import item_bounds
from data_prep.pipeline.units import Planned, Stage

if TYPE_CHECKING:
    from data_prep.pipeline.plan import Plan

TRAIN, VALIDATION, DUPLICATE, NEAR_DUPLICATE = range(4)
SHOWN = 3  # near duplicates of a unit, for people
FATES = ("train", "validation", "duplicate", "near duplicate")


@dataclass(frozen=True, slots=True)
class DeduplicateTask:
    """Hold each unit's folder (`extracted`), its first document's number, and that of all.

    `bounds` are these numbers; `documents` and `paragraphs` are the folders of the pairs.
    """

    extracted: tuple[Path, ...]
    bounds: tuple[int, ...]
    documents: tuple[Path, ...]
    paragraphs: tuple[Path, ...]
    paragraph_bounds: tuple[int, ...]
    validation: float
    seed: int


def _plan(plan: Plan) -> Iterator[Planned]:
    """Yield the one unit of the stage."""
    of_level = {
        level: tuple(unit.folder for unit in plan.units("match") if unit.task.level == level)
        for level in ("documents", "paragraphs")
    }
    task = DeduplicateTask(
        extracted=plan.folders("extract"),
        bounds=item_bounds(plan, "documents"),
        paragraph_bounds=item_bounds(plan, "paragraphs"),
        documents=of_level["documents"],
        paragraphs=of_level["paragraphs"],
        validation=plan.config.validation,
        seed=plan.config.seed,
    )
    keys = {"validation": task.validation, "seed": task.seed}
    yield Planned(task, keys, (plan.digest("extract"), plan.digest("match")))


def deduplicate(task: DeduplicateTask, folder: Path) -> dict[str, Any]:
    """Write `NNNNNN-fates.npy` [documents] and -paragraphs.npy [n, 2] for each unit of extraction.

    The result has by unit the bytes of each split in each part, the number of documents by fate,
    and some of its near duplicates, each after the first of its cluster; the bytes of all documents
    that are kept, and of the largest one, with its number.
    """
    items, cluster_of, near = _clusters(task.documents)
    is_duplicate = items != cluster_of
    keys: dict[int, bytes] = {}  # the smallest text hash of each cluster
    total, largest = 0, (0, 0)  # bytes; bytes and document
    # Bytes of the largest documents: no more can be above the share.
    many = math.ceil(1 / task.validation) if task.validation else 0
    large = np.empty(0, dtype=np.int64)
    for unit, (start, end) in zip(task.extracted, pairwise(task.bounds), strict=True):
        index, mine = read_index(unit), slice(*np.searchsorted(items, [start, end]))
        here, sizes = items[mine] - start, index["bytes"]
        for cluster, key in zip(cluster_of[mine].tolist(), index["key"][here], strict=True):
            keys[cluster] = min(key.tobytes(), keys.get(cluster, key.tobytes()))
        sizes[here[is_duplicate[mine]]] = -1
        alive = np.flatnonzero(sizes >= 0)
        if len(alive):
            total += int(sizes[alive].sum())
            large = np.sort(np.concatenate([large, sizes[alive]]))[-many:] if many else large
            if (size := int(sizes.max())) > largest[0]:
                largest = (size, start + int(sizes.argmax()))
    most = _most(total, large, task.validation)
    kept = held_out = 0
    extremes: list[tuple[float, int, int]] = []  # draw, unit, document: smallest and largest
    for number, (unit, start) in enumerate(zip(task.extracted, task.bounds[:-1], strict=True)):
        index = read_index(unit)
        draws, fits = index["draw"], index["bytes"] <= most
        fates = np.full(len(draws), TRAIN, dtype=np.uint8)
        mine = slice(*np.searchsorted(items, [start, start + len(draws)]))
        here = items[mine] - start
        draws[here] = [draw(keys[c], task.seed, "validation") for c in cluster_of[mine].tolist()]
        fates[(draws < task.validation) & fits] = VALIDATION
        fates[here[is_duplicate[mine]]] = DUPLICATE
        fates[here[is_duplicate[mine] & near[mine]]] = NEAR_DUPLICATE
        kept += int((fates < DUPLICATE).sum())
        held_out += int((fates == VALIDATION).sum())
        alive = np.flatnonzero((fates < DUPLICATE) & fits)
        for place in (np.argmin, np.argmax) if len(alive) else ():
            document = int(alive[place(draws[alive])])
            extremes.append((float(draws[document]), number, document))
        extremes = [min(extremes), max(extremes)] if extremes else []
        np.save(fates_file(folder, number), fates)
    # As if `validation` were just large, or small, enough for one document on the other side.
    if (held_out == 0 and kept > 1 and task.validation > 0) or (held_out == kept and extremes):
        _, number, document = extremes[0 if held_out == 0 else -1]
        fates = np.load(fates_file(folder, number))
        fates[document] = VALIDATION if held_out == 0 else TRAIN
        np.save(fates_file(folder, number), fates)
    is_near, accounts = is_duplicate & near, []
    repeated = _paragraphs(task, folder)
    for number, (unit, taken_out) in enumerate(zip(task.extracted, repeated, strict=True)):
        np.save(folder / f"{number:06d}-paragraphs.npy", taken_out)
        index, fates = read_index(unit), np.load(fates_file(folder, number))
        parts, sizes = index["part"], index["bytes"]
        totals = np.zeros((2, int(parts.max(initial=-1)) + 1), dtype=np.int64)
        alive = fates < DUPLICATE
        np.add.at(totals, (fates[alive], parts[alive]), sizes[alive])
        start, end = np.searchsorted(items, task.bounds[number : number + 2])
        shown = start + np.flatnonzero(is_near[start:end])[:SHOWN]
        accounts.append(
            {
                "parts": totals.tolist(),  # bytes of [train, validation] in each part
                "fates": np.bincount(fates, minlength=len(FATES)).tolist(),
                "paragraphs": len(taken_out),
                "near": np.stack([cluster_of[shown], items[shown]], axis=1).tolist(),
            }
        )
    return {"units": accounts, "bytes": total, "largest": largest}


def _most(total: int, large: npt.NDArray[np.int64], share: float) -> float:
    """Return the bytes of the largest document that may be held out.

    Documents above the share are, the smallest first, until those that may be hold as much as is
    asked for; one of more than half the text is not, where there are others.
    """
    most, above = share * total, large[large > share * total]
    left = total - int(above.sum())
    for size in above.tolist():
        if left >= share * total:
            break
        if 2 * size > total and left:
            break
        most, left = size, left + size
    return most


def fates_file(folder: Path, unit: int) -> Path:
    """Return the file of the fates of a unit's documents."""
    return folder / f"{unit:06d}-fates.npy"


def _clusters(
    folders: tuple[Path, ...],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return the items of all pairs, their clusters, and whether each is only a near duplicate."""
    none = np.empty((0, 2), dtype=np.int64)
    exact = np.concatenate([none, *(np.load(folder / "exact.npy") for folder in folders)])
    near = np.concatenate([none, *(np.load(folder / "near.npy") for folder in folders)])
    items, cluster_of = clusters(np.concatenate([exact, near]))
    return items, cluster_of, ~np.isin(items, exact[:, 1])


def _paragraphs(task: DeduplicateTask, folder: Path) -> list[npt.NDArray[np.uint32]]:
    """Return for each unit (document, line) [n, 2] of the paragraphs that repeat an earlier one.

    Of each cluster the first paragraph in a document that is kept stays.
    """
    if not task.paragraphs:
        return [np.empty((0, 2), dtype=np.uint32) for _ in task.extracted]
    items, cluster_of, _ = _clusters(task.paragraphs)
    places: list[npt.NDArray[np.uint32]] = []
    in_kept_document = []
    units = zip(task.extracted, pairwise(task.paragraph_bounds), strict=True)
    for number, (unit, (start, end)) in enumerate(units):
        files = chunk_files(unit, "paragraphs-places", end - start)
        saved = np.concatenate([np.empty((0, 2), np.uint32), *map(np.load, files)])
        mine = slice(*np.searchsorted(items, [start, start + len(saved)]))
        places.append(saved[items[mine] - start])
        fates = np.load(fates_file(folder, number))
        in_kept_document.append(fates[places[-1][:, 0]] < DUPLICATE)
    repeated = np.concatenate(in_kept_document)
    kept = np.flatnonzero(repeated)
    _, firsts = np.unique(cluster_of[kept], return_index=True)
    repeated[kept[firsts]] = False
    ends = np.cumsum([len(place) for place in places])
    return [
        place[repeated[end - len(place) : end]] for place, end in zip(places, ends, strict=True)
    ]


STAGE = Stage(
    "deduplicate",
    _plan,
    deduplicate,
    reads={"extract": ("index.arrow", "*-places-*"), "match": ("*",)},
    leaves_rows=lambda records: any(
        sum(unit["parts"][TRAIN]) for unit in records[0].result["units"]
    ),
    result_is_provenance=False,
)
