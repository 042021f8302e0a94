"""Write and read documents between stages: text in parts, an index, hashes for duplicates.

A unit of extraction writes `part-N.arrow`, `index.arrow` and what `Items` says for documents and
paragraphs. Nothing is held but a batch: one input may hold all documents of a corpus.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from data_prep.config import Deduplicate
from data_prep.duplicates.dedup import Items, draw, text_hash
from data_prep.pipeline.stages.columns import batch, column, fixed_width
from data_prep.sources import Document

BATCH_BYTES = 2**20
BATCH_DOCUMENTS = 2**14
NEAR_WORDS = 20  # texts below it, such as names of things in several sizes, are no near duplicates
MIN_PARAGRAPH = 80  # characters; shorter lines are headings and turns of phrase, and may repeat
DOCUMENTS = pa.schema(
    {"id": pa.string(), "title": pa.string(), "url": pa.string(), "text": pa.large_string()}
)
INDEX = pa.schema(
    {
        "key": pa.binary(16),  # hash of the cleaned text
        "draw": pa.float64(),  # what decides its split
        "part": pa.int32(),
        "bytes": pa.int64(),
    }
)


class DocumentWriter:
    """Write documents to part files of at most `part_bytes` of text (or one larger document)."""

    def __init__(self, folder: Path, part_bytes: int, deduplicate: Deduplicate, seed: int) -> None:
        self._folder = folder
        self._part_bytes = part_bytes
        self._seed = seed
        # The parts, each with its file, documents and bytes; the number of paragraphs hashed.
        self.summary: dict[str, Any] = {"parts": [], "paragraphs": 0}
        self._stream: pa.RecordBatchStreamWriter | None = None
        self._index = pa.ipc.new_stream(str(folder / "index.arrow"), INDEX)
        self._documents: list[tuple[str, str, str, str]] = []
        self._lines: list[tuple[bytes, float, int, int]] = []
        self._size = 0
        self._count = 0
        levels = {"documents": deduplicate.documents, "paragraphs": deduplicate.paragraphs}
        self._levels = {
            level: Items(folder, level, NEAR_WORDS if how == "near" else None)
            for level, how in levels.items()
            if how != "none"
        }

    def add(self, item: Document, text: str, key: bytes) -> None:
        """Add a document with its cleaned text and that text's hash."""
        size = len(text.encode())
        parts = self.summary["parts"]
        if not parts or parts[-1]["bytes"] + size > self._part_bytes:
            self._flush(end_part=True)
            file = f"part-{len(parts):05d}.arrow"
            parts.append({"file": file, "documents": 0, "bytes": 0})
            self._stream = pa.ipc.new_stream(str(self._folder / file), DOCUMENTS)
        parts[-1]["documents"] += 1
        parts[-1]["bytes"] += size
        chance = draw(key, self._seed, "validation")
        self._lines.append((key, chance, len(parts) - 1, size))
        self._documents.append((valid(item.id), valid(item.title), valid(item.url), text))
        if items := self._levels.get("documents"):
            items.add(key, text)
        if items := self._levels.get("paragraphs"):
            for line, paragraph in enumerate(text.split("\n")):
                if len(paragraph) >= MIN_PARAGRAPH:
                    items.add(text_hash(paragraph), paragraph, (self._count, line))
                    self.summary["paragraphs"] += 1
        self._count += 1
        self._size += size
        # Short documents, too, fill the memory: each takes some hundred bytes as objects.
        if self._size >= BATCH_BYTES or len(self._lines) >= BATCH_DOCUMENTS:
            self._flush()

    def _flush(self, end_part: bool = False) -> None:
        if self._lines:
            assert self._stream is not None
            self._stream.write_batch(batch(zip(*self._documents, strict=True), DOCUMENTS))
            self._index.write_batch(batch(zip(*self._lines, strict=True), INDEX))
        self._documents, self._lines, self._size = [], [], 0
        if end_part and self._stream is not None:
            self._stream.close()

    def close(self) -> None:
        """Write what is not written yet."""
        self._flush(end_part=True)
        self._index.close()
        for items in self._levels.values():
            items.save()


def valid(text: str) -> str:
    """Replace lone surrogates, which Arrow refuses."""
    return text.encode("utf-8", "replace").decode()


def read_part(file: Path, keep: npt.NDArray[np.bool_]) -> Iterator[tuple[int, Document]]:
    """Yield (number in the part, document) where `keep` [documents] is true, batch by batch."""
    start = 0
    with pa.ipc.open_stream(pa.memory_map(str(file))) as stream:
        for some in stream:
            wanted = np.flatnonzero(keep[start : start + len(some)])
            chosen = some.take(column(wanted, pa.int64())).to_pylist()
            for number, values in zip(wanted, chosen, strict=True):
                yield start + int(number), Document(**values)
            start += len(some)
    assert start == len(keep)


def read_index(unit: Path) -> dict[str, npt.NDArray[Any]]:
    """Return the columns of INDEX: an entry for each document that a unit of extraction kept."""
    with pa.ipc.open_stream(pa.memory_map(str(unit / "index.arrow"))) as stream:
        table = stream.read_all()
    return {name: fixed_width(table[name]) for name in INDEX.names}
