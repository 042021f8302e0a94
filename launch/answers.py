"""Answers of `distil audit` and `distil replay`: for a person, or one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from data_prep.audit import Found, Segment
from data_prep.messages import one_line
from launch.console.tables import print_table, show
from pretrain.replay import Replay, ReplayedRow

_MASKS = 6  # of a row, on its line
_LIMIT = 200  # characters of a title, an id or a URL
_ROW = "{:>8}  {:>4}  {:>11}  {:>5}  {:>9}  {:>6}  {}"
_TAKE_DOWN = (
    "to take a document down: remove it from the input, or add a filter, and run `distil prepare` "
    "into a new `output`; rows are packed anew, so their numbers and the digest change. A text "
    "that was dropped as its duplicate would then take its place: remove that as well"
)


def row_documents(row: int, split: str, segments: Sequence[Segment]) -> None:
    """The pieces in a row, each with its origin and its first words."""
    show([f"row {row} of {split}: {len(segments)} segment(s)"])
    for segment in segments:
        show(
            [
                "",
                f"[{segment.number}] tokens {segment.start} to {segment.end - 1}: "
                f"{one_line(segment.title, _LIMIT) or 'no title'}",
                f"    document  {one_line(segment.document, _LIMIT)}",
                f"    url       {one_line(segment.url, _LIMIT) or '-'}",
                f"    source    {one_line(segment.source, _LIMIT)} ({segment.kind})",
                f"    licence   {one_line(segment.licence, _LIMIT)}",
                f"    text      {one_line(segment.text, 160)}",
            ]
        )
    show(["", _TAKE_DOWN])


def document_rows(value: str, found: Found) -> None:
    """Every row that holds a document, and what to do about it."""
    names = {"document": "id", "url": "URL", "title": "title"}
    documents = {(p.source, p.document): p for p in found.places}
    rows = {(p.split, p.row) for p in found.places}
    show(
        [
            f"{one_line(value, _LIMIT)}: found by its {names[found.by]}: {len(documents)} "
            f"document(s) in {len(found.places)} segment(s) of {len(rows)} row(s)"
        ]
    )
    for (source, document), place in documents.items():
        show(
            [
                f"  {one_line(document, _LIMIT)}  {one_line(place.title, _LIMIT) or 'no title'}  "
                f"{one_line(place.url, _LIMIT) or 'no url'}  {one_line(source, _LIMIT)}, "
                f"{one_line(place.licence, _LIMIT)}"
            ]
        )
    print_table(
        ("split", "row", "shard", "row in shard", "start", "document"),
        [
            [
                p.split,
                f"{p.row}",
                p.shard,
                f"{p.row_in_shard}",
                f"{p.start}",
                one_line(p.document, 60),
            ]
            for p in found.places
        ],
    )
    for name, count in found.others.items():
        show([f"it is also the {names[name]} in {count} other segment(s), not listed here"])
    show([_TAKE_DOWN])


def replayed(replay: Replay, rank: int | None, num: int) -> None:
    """The first `num` rows of a step, or of a rank's share of it."""
    rows = replay.rows(rank)
    share = replay.num_rows // replay.world_size
    show(
        [
            f"step {replay.step} of {replay.num_steps}, counted as in the log: {replay.num_rows} "
            f"rows = {replay.micro_batch_size} rows x {share // replay.micro_batch_size} "
            f"micro-batch(es) x {replay.world_size} process(es)",
            _ROW.format("position", "rank", "micro-batch", "epoch", "row", "masked", "masks"),
        ]
    )
    show(_row(replay, row) for row in islice(rows, num))
    of = share if rank is not None else replay.num_rows
    whose = "" if rank is None else f" of rank {rank}"
    show(
        [
            f"{min(num, of)} of {of} rows{whose} (--rows for more, --json for all and for whole "
            "rows); positions, ranks, micro-batches and epochs count from 0",
            f"what a row is made of: distil audit {replay.shards.folder} --row ROW",
        ]
    )


def _row(replay: Replay, row: ReplayedRow) -> str:
    if row.skipped:
        return _ROW.format(
            row.index, row.rank, row.micro_batch, row.epoch, row.row, 0, "left out by --skip-rows"
        )
    masks = zip(row.labels.tolist(), row.shown.tolist(), strict=True)
    shown = [f"{replay.token(label)} -> {replay.token(id)}" for label, id in islice(masks, _MASKS)]
    more = len(row.labels) - len(shown)
    text = ", ".join(map(one_line, shown)) + (f", and {more} more" if more else "")
    return _ROW.format(
        row.index, row.rank, row.micro_batch, row.epoch, row.row, len(row.labels), text
    )


def json_lines(values: Iterable[object]) -> None:
    """One JSON object a line, for machines."""
    for value in values:
        print(json.dumps(value))


def segment_lines(folder: Path, row: int, split: str, segments: Iterable[Segment]) -> None:
    """The pieces of a row for machines."""
    where = {"folder": str(folder), "split": split, "row": row}
    json_lines({**where, **asdict(segment)} for segment in segments)


def place_lines(folder: Path, found: Found) -> None:
    """The places of a document for machines."""
    json_lines({"folder": str(folder), "by": found.by, **asdict(p)} for p in found.places)
