"""Implement `distil audit`: find the documents of a row, or the rows of a document."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from launch.commands import Shards

if TYPE_CHECKING:
    from data_prep.audit import Found

_LIMIT = 200  # characters of a title, an id or a URL
_TAKE_DOWN = (
    "to take a document down: remove it from the input, or add a filter, and run `distil prepare` "
    "into a new `output`; rows are packed again, so their numbers and the digest change. A text "
    "that was dropped as its duplicate would then take its place: remove that as well"
)


def audit(
    folder: Shards,
    row: Annotated[int | None, typer.Option(help="Name the documents in this row.", min=0)] = None,
    document: Annotated[
        str | None, typer.Option(help="List the rows that hold this id, URL or title.")
    ] = None,
    split: Annotated[str, typer.Option(help="Of --row: train or validation.")] = "train",
    source: Annotated[str | None, typer.Option(help="Of --document: only this source.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Name the documents in a row, or every row that holds a document.

    Example: distil audit shards/wikipedia-books --row 4711
    """
    from data_prep import CorpusError
    from data_prep.audit import documents_of_row, rows_of_document
    from data_prep.messages import one_line
    from data_prep.shards.manifest import Split
    from launch.console import show

    if (row is None) == (document is None):
        raise CorpusError("audit: give either --row NUMBER or --document ID")
    if row is not None:
        if split not in get_args(Split):
            raise CorpusError(f"--split {split}: there are {' and '.join(get_args(Split))}")
        segments = documents_of_row(folder, row, cast(Split, split))
        if as_json:
            where = {"folder": str(folder), "split": split, "row": row}
            for segment in segments:
                print(json.dumps({**where, **asdict(segment)}))
        else:
            show(f"row {row} of {split}: {len(segments)} segment(s)")
            for segment in segments:
                show(
                    "",
                    f"[{segment.number}] tokens {segment.start} to {segment.end - 1}: "
                    f"{one_line(segment.title, _LIMIT) or 'no title'}",
                    f"    document  {one_line(segment.document, _LIMIT)}",
                    f"    url       {one_line(segment.url, _LIMIT) or '-'}",
                    f"    source    {one_line(segment.source, _LIMIT)} ({segment.kind})",
                    f"    licence   {one_line(segment.licence, _LIMIT)}",
                    f"    text      {one_line(segment.text, 160)}",
                )
            show("", _TAKE_DOWN)
    elif document is not None:
        found = rows_of_document(folder, document, source)
        if as_json:
            for place in found.places:
                print(json.dumps({"folder": str(folder), "by": found.by, **asdict(place)}))
        else:
            show_document(document, found)


def show_document(value: str, found: Found) -> None:
    """Print every row that holds a document, and how to take it down."""
    from data_prep.messages import one_line
    from launch.console import print_table, show

    names = {"document": "id", "url": "URL", "title": "title"}
    documents = {(p.source, p.document): p for p in found.places}
    rows = {(p.split, p.row) for p in found.places}
    show(
        f"{one_line(value, _LIMIT)}: found by its {names[found.by]}: {len(documents)} "
        f"document(s) in {len(found.places)} segment(s) of {len(rows)} row(s)"
    )
    for (source, document), place in documents.items():
        show(
            f"  {one_line(document, _LIMIT)}  {one_line(place.title, _LIMIT) or 'no title'}  "
            f"{one_line(place.url, _LIMIT) or 'no url'}  {one_line(source, _LIMIT)}, "
            f"{one_line(place.licence, _LIMIT)}"
        )
    print_table(
        ("split", "row", "shard", "row in shard", "start", "document"),
        [
            [
                *map(str, (p.split, p.row, p.shard, p.row_in_shard, p.start)),
                one_line(p.document, 60),
            ]
            for p in found.places
        ],
    )
    for name, count in found.others.items():
        show(f"it is also the {names[name]} in {count} other segment(s), not listed here")
    show(_TAKE_DOWN)
