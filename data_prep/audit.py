"""Find the documents of a row and the rows of a document, for origin and take-down."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data_prep import CorpusError
from data_prep.shards import Manifest, Segments, ShardSet, check_file, load_manifest, open_shards
from data_prep.shards.manifest import AGAIN, Split, labels_file, side_file
from data_prep.shards.reading import map_labels
from data_prep.tokens import Tokens, of_shards

Field = Literal["document", "url", "title"]

_FIELDS: tuple[Field, ...] = ("document", "url", "title")
_BATCH_ROWS = 65_536
_CANDIDATES = 20_000  # ids that a misspelt one is compared with
_QUARANTINE = "quarantine.jsonl"


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


@dataclass(frozen=True, slots=True)
class Place:
    """Locate a piece of a document: `row` counts over the split, `row_in_shard` in the file."""

    split: Split
    row: int
    shard: str
    row_in_shard: int
    start: int
    source: str
    licence: str
    document: str
    title: str
    url: str


@dataclass(frozen=True, slots=True)
class Found:
    """Hold the places of a document, the field that matched, and other fields that match, too.

    `others` counts places that the value names in another way: an id may be another's title.
    """

    by: Field
    places: tuple[Place, ...]
    others: dict[Field, int]


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
    file, place = _place(shards, row)
    path = side_table(shards.folder, shards.manifest, file)
    ids = shards.rows([row])[0]
    special = shards.manifest.tokenizer.special_ids
    texts: list[str | None] = []
    if shards.manifest.has_texts:
        numbered = Segments(shards)
        numbers = numbered.of_rows([row]).numbers
        texts = numbered.texts(int(numbers[0]), int(numbers[-1]) + 1)
    found: list[Segment] = []
    for batch in _batches(path, pc.field("row") == place):
        for entry in batch.to_pylist():
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


def rows_of_document(folder: Path | str, value: str, source: str | None = None) -> Found:
    """Return every place that holds the document whose id, or else URL, or else title is `value`.

    The comparison is exact. Side tables are read one batch at a time, so memory grows with what is
    found alone.

    Args:
        folder: of shards.
        value: an id, a URL or a title.
        source: only in the source of this name; an id is unique within its source.

    Raises:
        CorpusError: no row holds it (with ids that come near, or why it was dropped where the
            quarantine names it), or there is no such source.
    """
    folder = Path(folder)
    manifest = load_manifest(folder)
    if manifest.has_labels:
        return _rows_of_example(folder, manifest, value)
    sources = [n for n, s in enumerate(manifest.sources) if source in (None, s.name)]
    if not sources:
        names = ", ".join(dict.fromkeys(source.name for source in manifest.sources))
        raise CorpusError(f"{folder}: no source is named {source!r}; there are: {names}")
    chosen = pc.field("source").isin(pa.array(sources, pa.int64()))
    named = [pc.field(name) == value for name in _FIELDS]
    wanted = chosen & (named[0] | named[1] | named[2])
    places: dict[Field, list[Place]] = {name: [] for name in _FIELDS}
    for split, record in manifest.splits.items() if value else ():
        first = 0  # row of the shard, in the split
        for shard in record.shards:
            for batch in _batches(side_table(folder, manifest, shard.file), wanted):
                for entry in batch.to_pylist():
                    origin = manifest.sources[entry["source"]]
                    place = Place(
                        split=split,
                        row=first + entry["row"],
                        shard=shard.file,
                        row_in_shard=entry["row"],
                        start=entry["start"],
                        source=origin.name,
                        licence=origin.licence,
                        **{name: entry[name] for name in _FIELDS},
                    )
                    places[next(name for name in _FIELDS if entry[name] == value)].append(place)
            first += shard.rows
    for by in _FIELDS:
        if places[by]:
            others = {name: len(places[name]) for name in _FIELDS if name != by and places[name]}
            return Found(by, tuple(places[by]), others)
    raise CorpusError(_not_found(folder, manifest, value, sources, source))


def _rows_of_example(folder: Path, manifest: Manifest, value: str) -> Found:
    """Return the rows of an example of a task's data, by its id."""
    places = []
    for source in manifest.sources:
        split = cast("Split", source.name)
        for shard in manifest.splits[split].shards:
            batch = map_labels(check_file(folder, manifest, labels_file(shard.file)))
            for row, id in enumerate(batch.column("id").to_pylist()):
                if id == value:
                    about = (source.name, source.licence, id, "", "")
                    places.append(Place(split, row, shard.file, row, 0, *about))
    if not places:
        raise CorpusError(f"{folder}: no example has the id {value!r}")
    return Found("document", tuple(places), {})


def side_table(folder: Path, manifest: Manifest, shard: str) -> Path:
    """Return the file that names a shard's segments, compared with the manifest."""
    return check_file(folder, manifest, side_file(shard))


def _batches(path: Path, wanted: pc.Expression | None = None) -> Iterator[pa.Table]:
    """Yield the rows of a side table that are wanted, in order."""
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        for batch in file.iter_batches(batch_size=_BATCH_ROWS):
            table = pa.Table.from_batches([batch])
            yield table if wanted is None else table.filter(wanted)


def _not_found(
    folder: Path, manifest: Manifest, value: str, sources: Sequence[int], source: str | None
) -> str:
    """Return the error for a document that is in no row, with the reason if it is known."""
    where = f" of source {source!r}" if source is not None else ""
    text = f"{folder}: no row holds a document{where} with the id, URL or title {value!r}"
    try:
        with (folder / _QUARANTINE).open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                entry: dict[str, Any] = json.loads(line)
                if value and entry.get("where") == value:
                    why = ": ".join(filter(None, (entry.get("reason"), entry.get("detail"))))
                    return f"{text}: it was dropped when the corpus was read ({why})"
    except (OSError, ValueError, AttributeError, TypeError):
        pass  # a hint is not worth an error

    def ids(containing: str | None) -> Iterator[str]:
        for record in manifest.splits.values():
            for shard in record.shards:
                for batch in _batches(side_table(folder, manifest, shard.file)):
                    column = batch["document"]
                    keep = pc.is_in(batch["source"].cast(pa.int64()), pa.array(sources, pa.int64()))
                    if containing is not None:
                        like = pc.match_substring(column, containing, ignore_case=True)
                        keep = pc.and_(keep, like)
                    yield from pc.unique(column.filter(keep)).to_pylist()

    # Up to three similar ids, among those that contain the value and the first ones.
    holding = islice(ids(value), _CANDIDATES) if value else ()
    candidates = dict.fromkeys([*holding, *islice(ids(None), _CANDIDATES)])
    folded = {id.lower(): id for id in reversed(candidates)}
    close = difflib.get_close_matches(value.lower(), folded, n=3, cutoff=0.6)
    holding_it = [id for key, id in folded.items() if value and value.lower() in key]
    if near := [folded[key] for key in close] or holding_it[:3]:
        text += f"; near it: {', '.join(map(repr, near))}"
    return (
        f"{text}; it may have been dropped (filtered, unreadable or a duplicate): "
        f"look into {folder / _QUARANTINE}"
    )
