"""The first stage: inputs -> cleaned, filtered documents in part files."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from data_prep.cleaning import clean
from data_prep.dedup import KEY, draw, text_hash
from data_prep.sources import Document, Rejected, Source, read

BATCH_BYTES = 2**20
DETAIL_CHARACTERS = 200
SCHEMA = pa.schema(
    {"id": pa.string(), "title": pa.string(), "url": pa.string(), "text": pa.large_string()}
)


@dataclass(frozen=True, slots=True)
class ExtractUnit:
    """Inputs of one source; `stem` is the path its files begin with."""

    number: int
    source_number: int
    source: Source
    inputs: tuple[str, ...]
    stem: Path
    part_bytes: int
    min_characters: int
    max_characters: int | None
    validation: float
    seed: int


@dataclass(frozen=True, slots=True)
class Part:
    """A file of documents, and per document: text hash, characters, bytes, in validation."""

    file: Path
    source_number: int
    keys: npt.NDArray[np.void]
    characters: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    validation: npt.NDArray[np.bool_]


@dataclass(slots=True)
class Extracted:
    """What a unit made of its inputs."""

    source_number: int
    quarantine: Path
    inputs: list[dict[str, Any]]
    parts: list[Part] = field(default_factory=list)
    documents_in: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


def extract(unit: ExtractUnit) -> Extracted:
    """Read, clean and filter; write `stem`-N.arrow parts and `stem`.jsonl of rejected documents."""
    result = Extracted(
        unit.source_number,
        unit.stem.with_suffix(".jsonl"),
        [input_record(unit.source_number, input) for input in unit.inputs],
    )
    writer = _PartWriter(unit, result.parts)
    with result.quarantine.open("w", encoding="ascii") as quarantine:
        for item in (item for input in unit.inputs for item in read(unit.source, input)):
            result.documents_in += 1
            if isinstance(item, Rejected):
                result.dropped[item.reason] += 1
                entry = {
                    "source": unit.source.label,
                    "where": item.where,
                    "reason": item.reason,
                    "detail": item.detail[:DETAIL_CHARACTERS],
                }
                quarantine.write(json.dumps(entry) + "\n")  # ASCII: surrogates stay escaped
                continue
            text = clean(item.text)
            key = text_hash(text)
            reason = _unwanted(text, key, unit)
            if reason:
                result.dropped[reason] += 1
            else:
                writer.add(item, text, key)
    writer.close()
    return result


def _unwanted(text: str, key: bytes, unit: ExtractUnit) -> str:
    if not text:
        return "empty"
    if len(text) < unit.min_characters:
        return "too short"
    if unit.max_characters is not None and len(text) > unit.max_characters:
        return "too long"
    if unit.source.fraction < 1 and draw(key, unit.seed, "fraction") >= unit.source.fraction:
        return "fraction"
    return ""


def input_record(source_number: int, input: str) -> dict[str, Any]:
    """What identifies an input: its name, and if it is a file its size, time and sha256."""
    record: dict[str, Any] = {"source": source_number, "input": os.path.basename(input)}
    if os.path.isfile(input):
        status = os.stat(input)
        sha256 = hashlib.sha256()
        with open(input, "rb") as file:
            while block := file.read(2**20):
                sha256.update(block)
        record |= {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
        record["sha256"] = sha256.hexdigest()
    return record


class _PartWriter:
    """Documents -> part files of at most `part_bytes` of text (or one larger document)."""

    def __init__(self, unit: ExtractUnit, parts: list[Part]) -> None:
        self._unit = unit
        self._parts = parts
        self._start()

    def _start(self) -> None:
        self._stream: pa.RecordBatchStreamWriter | None = None
        self._batch: list[tuple[str, str, str, str]] = []
        self._batch_bytes = 0
        self._keys: list[bytes] = []
        self._characters: list[int] = []
        self._sizes: list[int] = []
        self._bytes = 0

    @property
    def _file(self) -> Path:
        stem = self._unit.stem
        return stem.with_name(f"{stem.name}-{len(self._parts):05d}.arrow")

    def add(self, document: Document, text: str, key: bytes) -> None:
        size = len(text.encode())
        if self._sizes and self._bytes + size > self._unit.part_bytes:
            self.close()
        self._batch.append(
            (_plain(document.id), _plain(document.title), _plain(document.url), text)
        )
        self._keys.append(key)
        self._characters.append(len(text))
        self._sizes.append(size)
        self._bytes += size
        self._batch_bytes += size
        if self._batch_bytes >= BATCH_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._stream is None:
            self._stream = pa.ipc.new_stream(str(self._file), SCHEMA)
        columns = [list(column) for column in zip(*self._batch, strict=True)]
        self._stream.write_batch(pa.record_batch(columns, schema=SCHEMA))
        self._batch, self._batch_bytes = [], 0

    def close(self) -> None:
        """Finish the part; the next document starts another."""
        if not self._sizes:
            return
        if self._batch:
            self._flush()
        assert self._stream is not None
        self._stream.close()
        unit = self._unit
        limit, seed = unit.validation, unit.seed
        validation = [limit > 0 and draw(key, seed, "validation") < limit for key in self._keys]
        self._parts.append(
            Part(
                self._file,
                unit.source_number,
                np.frombuffer(b"".join(self._keys), dtype=KEY),
                np.array(self._characters, dtype=np.int64),
                np.array(self._sizes, dtype=np.int64),
                np.array(validation, dtype=bool),
            )
        )
        self._start()


def _plain(text: str) -> str:
    """Ids, titles and links go to Arrow, which takes no lone surrogates."""
    return text.encode("utf-8", "replace").decode()


def read_part(file: Path, keep: npt.NDArray[np.bool_]) -> Iterator[Document]:
    """The documents of a part that `keep` [documents] marks, a batch at a time."""
    start = 0
    with pa.ipc.open_stream(pa.memory_map(str(file))) as stream:
        for batch in stream:
            wanted = pa.array(keep[start : start + len(batch)])
            for values in batch.filter(wanted).to_pylist():
                yield Document(**values)
            start += len(batch)
    assert start == len(keep)
