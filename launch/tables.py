"""Results as a person reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from data_prep.shards import Manifest
from launch.progress import console

_SEGMENTS = 4  # of a row, in an inspection


def show(lines: Iterable[str]) -> None:
    """Plain lines."""
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def corpus_lines(folder: Path, manifest: Manifest, state: str) -> list[str]:
    """What a prepared corpus holds, a line a split and a source."""
    lines = []
    for name, split in manifest.splits.items():
        full = split.tokens / max(1, split.rows * manifest.row_length)
        lines.append(
            f"{name}: {split.rows:,} rows x {manifest.row_length}, {split.tokens:,} tokens, "
            f"{full:.1%} full, {len(split.shards)} shard(s)"
        )
    for source in manifest.sources:
        dropped = ", ".join(f"{count:,} {why}" for why, count in source.dropped.items() if count)
        lines.append(
            f"{source.name}: {source.documents_in:,} documents, {source.documents_kept:,} kept"
            + (f" (dropped: {dropped})" if dropped else "")
        )
    return [*lines, f"{folder}: {state}, digest {manifest.digest[:16]}"]


def inspection(summary: Mapping[str, Any]) -> None:
    """Counts, fill, unknown share, sources and decoded rows."""
    show([f"digest {summary['digest'][:16]}, vocabulary {summary['vocab_size']:,}"])
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
    show(
        [
            f"unknown words: {summary['unknown']:.3%} of tokens; "
            f"{summary['tokens_per_document']:,.1f} tokens a document"
        ]
    )
    for row in summary["rows"]:
        segments = row["segments"]
        show(["", f"row {row['row']}: {len(segments)} document(s)"])
        for segment in segments[:_SEGMENTS]:
            title = segment["title"] or segment["document"]
            show([f"  [{title}] {_shortened(segment['text'])}"])
        if len(segments) > _SEGMENTS:
            show([f"  ... and {len(segments) - _SEGMENTS} more"])


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table whose first column is words and whose numbers line up."""
    table = Table()
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _shortened(text: str, limit: int = 160) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else f"{text[: limit - 1]}..."
