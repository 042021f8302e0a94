"""Describe a stage: its units, the function that runs one, and the files that it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

# Not at run time: the source of a stage would then count as changed with that of the plan.
if TYPE_CHECKING:
    from data_prep.pipeline.plan import Plan
    from data_prep.pipeline.units import NamedPiece, UnitRecord

Reads = Mapping[str, tuple[str, ...]]  # earlier stage -> patterns of its outputs


class Planned(NamedTuple):
    """Hold what one unit is to do; `keys` are all the settings that shape its outputs.

    `upstream` are the digests of what it reads of earlier stages, `pieces` the inputs it reads.
    """

    task: Any
    keys: dict[str, Any]
    upstream: tuple[str, ...] = ()
    pieces: tuple[NamedPiece, ...] = ()


@dataclass(frozen=True, slots=True)
class Stage:
    """Hold one stage of the pipeline.

    Args:
        name: of the stage, of its folder, and for `--stage`.
        plan: yields the units in order, once all earlier stages are complete.
        run: takes a task and an empty folder, fills it, and returns the result for later stages.
        reads: patterns of the files that its units read, by earlier stage.
        files_read: returns the files of an earlier stage that a task reads; none means all.
        leaves_rows: returns, from the stage's records, whether a training row can still come.
        warnings: returns the warnings that a unit's result calls for.
        result_is_provenance: False keeps a large result out of provenance.jsonl.
    """

    name: str
    plan: Callable[[Plan], Iterator[Planned]]
    run: Callable[[Any, Path], dict[str, Any]]
    reads: Reads
    files_read: Callable[[Any], Iterable[Path]] = lambda task: ()
    leaves_rows: Callable[[Sequence[UnitRecord]], bool] = lambda records: True
    warnings: Callable[[dict[str, Any]], Iterable[str]] = lambda result: ()
    result_is_provenance: bool = True


def group(sizes: Sequence[int], limit: int) -> list[range]:
    """Join consecutive items into groups of at most `limit`; a larger item is its own group."""
    groups: list[range] = []
    start, total = 0, 0
    for item, size in enumerate(sizes):
        if item > start and total + size > limit:
            groups.append(range(start, item))
            start, total = item, 0
        total += size
    if len(sizes) > start:
        groups.append(range(start, len(sizes)))
    return groups
