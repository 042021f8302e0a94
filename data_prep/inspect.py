"""Tell what a finished folder holds: numbers, readable rows, and the documents of a row."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data_prep import CorpusError
from data_prep.shards import (
    Segments,
    ShardSet,
    check_file,
    load_manifest,
    open_shards,
)
from data_prep.shards.manifest import AGAIN, Split, labels_file, side_file
from data_prep.shards.reading import map_labels
from data_prep.tokens import Tokens, of_shards

_FIELDS = ("document", "url", "title")


@dataclass(frozen=True, slots=True)
class Segment:
    """Hold a piece of a document at positions `start` to `end` - 1, with [CLS] and [SEP]."""

    number: int
    start: int
    end: int
    source: str
    kind: str
    licence: str
    document: str
    title: str
    url: str
    text: str  # as training reads it: decoded
    kept_text: str | None  # the cleaned text, of a whole document under `keep_text`


def decoded(folder: Path | str, rows: int = 3) -> list[tuple[int, list[Segment]]]:
    """Return the numbers of some training rows, evenly spread, and the pieces in each."""
    shards = open_shards(folder)
    tokens = of_shards(shards.folder, shards.manifest)
    numbers = np.unique(np.linspace(0, len(shards) - 1, rows, dtype=np.int64)).tolist()
    return [(row, segments_of(shards, tokens, row)) for row in numbers]


def leftovers(folder: Path | str, examples: int = 20) -> dict[str, Any]:
    """Return the markup left in Wikipedia's text: counts by source and class, and examples.

    CorpusError if the folder holds no finished shards.
    """
    folder = Path(folder)
    manifest = load_manifest(folder)
    with check_file(folder, manifest, "leftovers.jsonl").open(encoding="ascii") as lines:
        return {
            "sources": {source.name: source.leftovers for source in manifest.sources},
            "examples": [json.loads(line) for line in islice(lines, examples)],
        }


def documents_of_row(folder: Path | str, row: int, split: Split = "train") -> list[Segment]:
    """Return the pieces in a row, decoded; rows are numbered over the whole split, as training
    does.

    Raises:
        CorpusError: no such split or row, or a side table that does not fit its shard.
    """
    shards = open_shards(folder, split)
    if not 0 <= row < len(shards):
        raise CorpusError(f"{folder}: {split} has rows 0 to {len(shards) - 1}, not {row}")
    return segments_of(shards, of_shards(shards.folder, shards.manifest), row)


def segments_of(shards: ShardSet, tokens: Tokens, row: int) -> list[Segment]:
    """Return the pieces in a row of an open split; of a task's data its example, with labels."""
    if shards.manifest.has_labels:
        return [_example(shards, tokens, row)]
    shard, place = _place(shards, row)
    path = check_file(shards.folder, shards.manifest, side_file(shard))
    ids = shards.rows([row])[0]
    special = shards.manifest.tokenizer.special_ids
    texts: list[str | None] = []
    if shards.manifest.has_texts:
        numbered = Segments(shards)
        numbers = numbered.of_rows([row]).numbers
        texts = numbered.texts(int(numbers[0]), int(numbers[-1]) + 1)
    of_row = pc.field("row") == place
    entries = pq.read_table(path, filters=of_row, page_checksum_verification=True).to_pylist()
    found: list[Segment] = []
    for entry in entries:
        start = entry["start"]
        ends = np.flatnonzero(ids[start:] == special.sep)
        if ids[start] != special.cls or not len(ends):
            raise CorpusError(f"{path}: does not match the segments of its shard: {AGAIN}")
        end = start + int(ends[0]) + 1
        source = shards.manifest.sources[entry["source"]]
        found.append(
            Segment(
                number=len(found),
                start=start,
                end=end,
                source=source.name,
                kind=source.kind,
                licence=source.licence,
                **{name: entry[name] for name in _FIELDS},
                text=tokens.decode(ids[start + 1 : end - 1]),
                kept_text=texts[len(found)] if texts else None,
            )
        )
    return found


def _example(shards: ShardSet, tokens: Tokens, row: int) -> Segment:
    """Return the example in a row of a task's data; its labels stand in the place of a title."""
    manifest = shards.manifest
    file, place = _place(shards, row)
    batch = map_labels(check_file(shards.folder, manifest, labels_file(file)))
    (entry,) = batch.slice(place, 1).to_pylist()
    names = manifest.labels
    labels = []
    for key, value in entry.items():
        if key in ("id", "second"):
            continue
        if key == "label":
            value = names[value] if value >= 0 else None
        elif key == "tags":
            value = [names[tag] for tag in value if tag >= 0]
        labels.append(f"{key}: {value}")
    ids = shards.rows([row])[0]
    end = int(np.count_nonzero(ids != manifest.tokenizer.special_ids.pad))
    source = next(source for source in manifest.sources if source.name == shards.split)
    return Segment(
        number=0,
        start=0,
        end=end,
        source=source.name,
        kind=source.kind,
        licence=source.licence,
        document=entry["id"],
        title="; ".join(labels),
        url="",
        text=tokens.decode(ids[1 : end - 1]),
        kept_text=None,
    )


def _place(shards: ShardSet, row: int) -> tuple[str, int]:
    """Return the file of a row's shard, and its number there."""
    shard = int(shards.shard_of(np.array([row]))[0])
    file = shards.manifest.splits[shards.split].shards[shard].file
    return file, row - int(shards.starts[shard])
