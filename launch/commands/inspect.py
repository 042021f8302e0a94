"""Implement `distil inspect`: show what a prepared corpus holds."""

from __future__ import annotations

from typing import Annotated

import typer

from launch.commands import Shards

_DOCUMENTS = 4  # shown of a row
_TEXT = 160  # characters of a document


def inspect(
    folder: Shards,
    rows: Annotated[int, typer.Option(help="How many rows to decode.", min=0)] = 3,
    leftovers: Annotated[
        bool, typer.Option("--leftovers", help="Count the markup that cleaning left in the text.")
    ] = False,
) -> None:
    """Show counts, fill, unknown words and a few decoded rows.

    Example: distil inspect shards/wikipedia-books --rows 5
    """
    from data_prep import inspect as data
    from data_prep.messages import one_line
    from data_prep.shards.manifest import listed
    from launch.console import counts, print_table, show

    if leftovers:
        found = data.leftovers(folder)
        for source, classes in found["sources"].items():
            total = sum(classes.values())
            show(f"{source}: {total:,} leftover(s){counts('of these', classes)}")
        for place in found["examples"]:
            title = place["title"] or place["document"]
            show(f"  {place['kind']} in {title}: {place['text']}")
        return

    summary = data.summary(folder, rows)
    normaliser = f", {summary['normaliser']}" if summary["normaliser"] else ""
    show(f"digest {summary['digest'][:16]}, vocabulary {summary['vocab_size']:,}{normaliser}")
    columns = ("split", "rows", "tokens", "segments", "shards", "fill")
    print_table(
        columns,
        [
            [name, *(f"{split[c]:,}" for c in columns[1:-1]), f"{split['fill']:.2%}"]
            for name, split in summary["splits"].items()
        ],
    )
    print_table(
        ("source", "kind", "licence", "in", "kept", "dropped"),
        [
            [
                source["name"],
                source["kind"],
                source["licence"],
                f"{source['documents_in']:,}",
                f"{source['documents_kept']:,}",
                ", ".join(f"{n:,} {why}" for why, n in source["dropped"].items() if n) or "-",
            ]
            for source in summary["sources"]
        ],
    )
    if summary["unknown_strings"]:
        strings = listed(summary["unknown_strings"])
        show(f"most frequent unknown strings of its first documents: {strings}")
    show(
        f"unknown words: {summary['unknown']:.3%} of tokens; "
        f"{summary['tokens_per_document']:,.1f} tokens a document"
    )
    for row in summary["rows"]:
        documents = row["segments"]
        show("", f"row {row['row']}: {len(documents)} document(s)")
        for document in documents[:_DOCUMENTS]:
            title = document["title"] or document["document"]
            text = document["kept_text"] or document["text"]
            show(f"  [{one_line(title)}] {one_line(text, _TEXT)}")
        if len(documents) > _DOCUMENTS:
            show(f"  ... and {len(documents) - _DOCUMENTS} more")
