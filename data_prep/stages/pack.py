"""The last stage: kept documents -> ids -> packed rows -> one shard and its side table."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.extract import read_part
from data_prep.packing import cut, cut_at_lines, fill_rows, pack
from data_prep.shards import write_file, write_shard
from data_prep.shards.manifest import ShardRecord
from data_prep.sources import Document
from data_prep.tokens import Tokens, load

# Best fit wants many segments to choose from; ids of a window take 8 MB.
WINDOW_TOKENS = 2_000_000
BATCH_CHARACTERS = 1_000_000
SEGMENTS = pa.schema(
    {
        "row": pa.int32(),
        "start": pa.int16(),
        "source": pa.int16(),
        "document": pa.string(),
        "title": pa.string(),
        "url": pa.string(),
    }
)


@dataclass(frozen=True, slots=True)
class PartSlice:
    """The documents of a part that `keep` marks; `by_line` cuts them at line ends only."""

    file: Path
    source_number: int
    by_line: bool
    keep: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class RowsUnit:
    """Documents that become one shard: `folder`/`split`-`number`.arrow and .parquet."""

    split: Literal["train", "validation"]
    number: int
    slices: tuple[PartSlice, ...]
    tokenizer: Path
    row_length: int
    dtype: str
    folder: Path


@dataclass(frozen=True, slots=True)
class RowsResult:
    """`shard` is None when no document had a token; `counts` [vocab_size] of ids in the rows."""

    unit: RowsUnit
    shard: ShardRecord | None
    segments: int
    counts: npt.NDArray[np.int64]
    without_tokens: Counter[int]


@dataclass(frozen=True, slots=True)
class _Segment:
    ids: npt.NDArray[np.int32]
    source_number: int
    document: Document


def write_rows(unit: RowsUnit) -> RowsResult:
    """Tokenise, pack and write the unit's documents."""
    tokens = load(unit.tokenizer)
    without_tokens: Counter[int] = Counter()
    filled: list[npt.NDArray[Any]] = []
    columns: dict[str, list[Any]] = {name: [] for name in SEGMENTS.names}
    num_rows = 0
    for window in _windows(_segments(unit, tokens, without_tokens)):
        rows, places = _pack_window(window, unit, tokens)
        filled.append(rows)
        columns["row"] += (places[:, 0] + num_rows).tolist()
        columns["start"] += places[:, 1].tolist()
        for number in places[:, 2].tolist():
            segment = window[number]
            columns["source"].append(segment.source_number)
            columns["document"].append(segment.document.id)
            columns["title"].append(segment.document.title)
            columns["url"].append(segment.document.url)
        num_rows += len(rows)
    counts = np.zeros(len(tokens.vocabulary), dtype=np.int64)
    if not filled:
        return RowsResult(unit, None, 0, counts, without_tokens)
    ids = np.concatenate(filled)
    counts += np.bincount(ids.reshape(-1), minlength=len(counts))
    name = f"{unit.split}-{unit.number:05d}"
    shard = write_shard(unit.folder / f"{name}.arrow", ids, pad=tokens.special_ids.pad)
    table = pa.table(columns, schema=SEGMENTS)
    write_file(
        unit.folder / f"{name}.parquet",
        lambda file: pq.write_table(table, file, compression="zstd", write_page_checksum=True),
    )
    return RowsResult(unit, shard, len(table), counts, without_tokens)


def _pack_window(
    window: list[_Segment], unit: RowsUnit, tokens: Tokens
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    special = tokens.special_ids
    ids = [segment.ids for segment in window]
    rows = pack([len(segment) + 2 for segment in ids], unit.row_length)
    return fill_rows(
        ids,
        rows,
        unit.row_length,
        cls=special.cls,
        sep=special.sep,
        pad=special.pad,
        dtype=unit.dtype,
    )


def _windows(segments: Iterator[_Segment]) -> Iterator[list[_Segment]]:
    window: list[_Segment] = []
    size = 0
    for segment in segments:
        window.append(segment)
        size += len(segment.ids) + 2
        if size >= WINDOW_TOKENS:
            yield window
            window, size = [], 0
    if window:
        yield window


def _segments(unit: RowsUnit, tokens: Tokens, without_tokens: Counter[int]) -> Iterator[_Segment]:
    """Every document's ids in pieces that fit a row."""
    limit = unit.row_length - 2
    for part in unit.slices:
        for batch in _batches(read_part(part.file, part.keep)):
            texts = [doc.text.split("\n") if part.by_line else [doc.text] for doc in batch]
            encoded = iter(tokens.encode_batch(list(chain.from_iterable(texts))))
            for document, lines in zip(batch, texts, strict=True):
                ids = [next(encoded) for _ in lines]
                found = cut_at_lines(ids, limit) if part.by_line else cut(ids[0], limit)
                if not any(len(piece) for piece in found):
                    without_tokens[part.source_number] += 1
                    continue
                # The text is done with: only what the side table needs lives on in the window.
                origin = Document("", document.id, document.title, document.url)
                for piece in found:
                    yield _Segment(piece, part.source_number, origin)


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
