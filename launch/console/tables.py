"""Results as a person reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import filesize
from rich.table import Table
from rich.text import Text

from data_prep.estimate import Estimate
from data_prep.messages import one_line, printable
from data_prep.shards import Manifest
from launch.console.progress import console

_SEGMENTS = 4  # of a row, in an inspection
_TEXT = 160  # characters of a segment


def show(lines: Iterable[str]) -> None:
    """Plain lines."""
    for line in lines:
        console.print(printable(line), markup=False, soft_wrap=True)


def corpus_lines(folder: Path, manifest: Manifest, state: str) -> list[str]:
    """Return what a prepared corpus holds, a line a split and a source."""
    lines = []
    for name, split in manifest.splits.items():
        full = split.tokens / max(1, split.rows * manifest.row_length)
        lines.append(
            f"{name}: {split.rows:,} rows x {manifest.row_length}, {split.tokens:,} tokens, "
            f"{full:.1%} full, {len(split.shards)} shard(s)"
        )
    for source in manifest.sources:
        lines.append(
            f"{source.name}: {source.documents_in:,} documents, {source.documents_kept:,} kept"
            + _listed("dropped", source.dropped)
            + _listed("noted", source.noted)
            + _listed("markup left", source.leftovers)
            + _listed("share text with", source.contaminated)
        )
    if manifest.normaliser:
        size = manifest.tokenizer.vocab_size
        lines.append(f"tokenizer: {size:,} entries, {manifest.normaliser}")
    return [*lines, f"{folder}: {state}, digest {manifest.digest[:16]}"]


def _listed(what: str, counts: Mapping[str, int]) -> str:
    shown = ", ".join(f"{count:,} {name}" for name, count in counts.items())
    return f"; {what}: {shown}" if shown else ""


def leftovers(found: Mapping[str, Any]) -> None:
    """Markup that is left in the text: counts by source and class, and places."""
    for source, counts in found["sources"].items():
        total = sum(counts.values())
        show([f"{source}: {total:,} leftover(s){_listed('of these', counts)}"])
    for example in found["examples"]:
        show(
            [f"  {example['kind']} in {example['title'] or example['document']}: {example['text']}"]
        )


def estimated(estimate: Estimate, workers: int) -> None:
    """A dry run's figures, by source and in all."""
    for source in estimate.sources:
        rows = ", ".join(
            f"{count:,} rows of {length} ({source.fill[length]:.1%} full)"
            for length, count in source.rows.items()
        )
        show(
            [
                f"{source.name}: {_size(source.stored_bytes)}, of which {source.share:.1%} sampled",
                f"  {source.documents:,} documents, {source.kept:,} kept"
                + _listed("in the sample dropped", source.dropped),
                f"  {source.tokens:,} tokens, {source.tokens / max(source.words, 1):.2f} a word, "
                f"{source.unknown:.3%} unknown; {rows}",
            ]
        )
    trained = " (trained on the sample)" if estimate.trained else ""
    show(
        [
            f"in all {sum(s.tokens for s in estimate.sources):,} tokens of a vocabulary of "
            f"{estimate.vocab_size:,}{trained}; duplicates are not taken off",
            f"disk: {_size(estimate.shard_bytes)} of shards, {_size(estimate.work_bytes)} of work "
            "files until they are finished",
            f"time: about {_duration(estimate.seconds)} with workers={workers}",
        ]
    )


def _size(num_bytes: int) -> str:
    return filesize.decimal(num_bytes)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def inspection(summary: Mapping[str, Any]) -> None:
    """Counts, fill, unknown share, sources and decoded rows."""
    normaliser = f", {summary['normaliser']}" if summary["normaliser"] else ""
    show([f"digest {summary['digest'][:16]}, vocabulary {summary['vocab_size']:,}{normaliser}"])
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
            show([f"  [{one_line(title)}] {one_line(segment['text'], _TEXT)}"])
        if len(segments) > _SEGMENTS:
            show([f"  ... and {len(segments) - _SEGMENTS} more"])


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table whose first column is words and whose numbers line up."""
    table = Table()
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*(Text(one_line(cell)) for cell in row))  # its brackets are no markup
    console.print(table)
