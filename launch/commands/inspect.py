"""Implement `distil inspect`: show what a prepared corpus holds."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from launch.commands import Shards

if TYPE_CHECKING:
    from data_prep.inspect import Segment

_Split = Literal["train", "validation", "test"]
_DOCUMENTS = 4  # shown of a row
_TEXT = 160  # characters of a document
_LIMIT = 200  # characters of a title, an id or a URL


def inspect(
    folder: Shards,
    rows: Annotated[int, typer.Option(help="How many rows to decode.", min=0)] = 3,
    leftovers: Annotated[
        bool, typer.Option("--leftovers", help="Count the markup that cleaning left in the text.")
    ] = False,
    row: Annotated[int | None, typer.Option(help="Name the documents in this row.", min=0)] = None,
    split: Annotated[
        Literal["train", "validation", "test"], typer.Option(help="Of --row.")
    ] = "train",
    as_json: Annotated[
        bool, typer.Option("--json", help="Of --row: one JSON object a line.")
    ] = False,
) -> None:
    """Show counts, fill and a few decoded rows, or the documents of one row.

    Example: distil inspect shards/wikipedia-books --rows 5
    """
    from data_prep import inspect as data
    from data_prep.messages import one_line
    from data_prep.shards import load_manifest
    from data_prep.shards.manifest import listed
    from launch.console import counts, show
    from launch.stages.prepare import corpus_lines

    if row is not None:
        segments = data.documents_of_row(folder, row, split)
        if as_json:
            where = {"folder": str(folder), "split": split, "row": row}
            for segment in segments:
                print(json.dumps({**where, **asdict(segment)}))
        else:
            show(f"row {row} of {split}: {len(segments)} segment(s)")
            for segment in segments:
                _show_segment(segment)
        return
    if leftovers:
        found = data.leftovers(folder)
        for source, classes in found["sources"].items():
            total = sum(classes.values())
            show(f"{source}: {total:,} leftover(s){counts('of these', classes)}")
        for place in found["examples"]:
            title = place["title"] or place["document"]
            show(f"  {place['kind']} in {title}: {place['text']}")
        return

    manifest = load_manifest(folder)
    show(*corpus_lines(folder, manifest, "finished"))
    if manifest.unknown is not None:
        strings = listed(manifest.unknown.strings)
        show(f"most frequent unknown strings of its first documents: {strings}")
    for number, documents in data.decoded(folder, rows):
        show("", f"row {number}: {len(documents)} document(s)")
        for document in documents[:_DOCUMENTS]:
            text = document.kept_text or document.text
            show(f"  [{one_line(document.title or document.document)}] {one_line(text, _TEXT)}")
        if len(documents) > _DOCUMENTS:
            show(f"  ... and {len(documents) - _DOCUMENTS} more")


def _show_segment(segment: Segment) -> None:
    """Print where a piece of a row comes from, and its text."""
    from data_prep.messages import one_line
    from launch.console import show

    show(
        "",
        f"[{segment.number}] tokens {segment.start} to {segment.end - 1}: "
        f"{one_line(segment.title, _LIMIT) or 'no title'}",
        f"    document  {one_line(segment.document, _LIMIT)}",
        f"    url       {one_line(segment.url, _LIMIT) or '-'}",
        f"    source    {one_line(segment.source, _LIMIT)} ({segment.kind})",
        f"    licence   {one_line(segment.licence, _LIMIT)}",
        f"    text      {one_line(segment.text, _TEXT)}",
    )
