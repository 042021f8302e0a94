"""Pieces of inputs -> cleaned, filtered documents, and what finds their duplicates.

A unit writes `part-N.arrow` (documents), `index.arrow` (a line a document), `quarantine.jsonl`,
`leftovers.jsonl`, `contaminated.jsonl`, and per level of deduplication `LEVEL-texts.npy`,
`LEVEL-bands.npy` and `LEVEL-signatures.npy`.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from data_prep import decontamination, language, leftovers
from data_prep.cleaning import clean
from data_prep.config import Deduplicate
from data_prep.decontamination import Contamination
from data_prep.dedup import Items, draw, text_hash
from data_prep.minhash import word_hashes
from data_prep.sources import Document, Piece, Rejected, Source, read
from data_prep.stages.watchdog import Watchdog

BATCH_BYTES = 2**20
DETAIL_CHARACTERS = 200
EXAMPLES = 20  # of leftovers, by class
MIN_PARAGRAPH = 80  # characters; shorter lines are headings and turns of phrase, and may repeat
DOCUMENTS = pa.schema(
    {"id": pa.string(), "title": pa.string(), "url": pa.string(), "text": pa.large_string()}
)
INDEX = pa.schema(
    {
        "key": pa.binary(16),  # of the cleaned text
        "draw": pa.float64(),  # what decides its split
        "part": pa.int32(),
        "characters": pa.int64(),
        "bytes": pa.int64(),
    }
)


@dataclass(frozen=True, slots=True)
class ExtractTask:
    """Pieces of one source, and what to do with their documents."""

    source_number: int
    source: Source
    pieces: tuple[Piece, ...]
    part_bytes: int
    min_characters: int
    max_characters: int | None
    deduplicate: Deduplicate
    contamination: Path | None
    remove_contaminated: bool
    seed: int


def extract(task: ExtractTask, folder: Path) -> dict[str, Any]:
    """Read, clean and filter the documents of a unit."""
    counts = _Counts()
    examples = None if task.contamination is None else decontamination.load(task.contamination)
    with ExitStack() as stack:
        logs = {
            name: stack.enter_context((folder / f"{name}.jsonl").open("w", encoding="ascii"))
            for name in ("quarantine", "leftovers", "contaminated")
        }
        watchdog = stack.enter_context(Watchdog(folder))
        parts = _Parts(task, folder)
        for piece in task.pieces:
            for item in read(task.source, piece):
                watchdog.passed(item.where if isinstance(item, Rejected) else item.id)
                counts.documents_in += 1
                if isinstance(item, Rejected):
                    _quarantine(item, task.source, counts, logs["quarantine"])
                    continue
                text = clean(item.text)
                key = text_hash(text)
                reason = _unwanted(text, key, task)
                if not reason and examples is not None:
                    reason = _contaminated(item, text, examples, task, counts, logs)
                if reason:
                    counts.dropped[reason] += 1
                    continue
                counts.noted.update(item.notes)
                if _is_wikipedia(task.source):
                    _leftovers(item, text, counts, logs["leftovers"])
                parts.add(item, text, key)
    return {"source": task.source_number, **parts.close(), **counts.as_json()}


class _Counts:
    """What a unit counts of its documents."""

    def __init__(self) -> None:
        self.documents_in = 0
        self.dropped: Counter[str] = Counter()
        self.noted: Counter[str] = Counter()
        self.leftovers: Counter[str] = Counter()
        self.contaminated: Counter[str] = Counter()

    def as_json(self) -> dict[str, Any]:
        return {
            name: value if isinstance(value, int) else dict(sorted(value.items()))
            for name, value in vars(self).items()
        }


def _unwanted(text: str, key: bytes, task: ExtractTask) -> str:
    if not text:
        return "empty"
    if len(text) < task.min_characters:
        return "too short"
    if task.max_characters is not None and len(text) > task.max_characters:
        return "too long"
    if task.source.languages:
        found = language.identify(text)
        if found and found not in task.source.languages:
            return f"language {found}"
    if task.source.fraction < 1 and draw(key, task.seed, "fraction") >= task.source.fraction:
        return "fraction"
    return ""


def _contaminated(
    item: Document,
    text: str,
    examples: Contamination,
    task: ExtractTask,
    counts: _Counts,
    logs: Mapping[str, IO[str]],
) -> str:
    """The reason to drop a document that overlaps an evaluation file ("" to keep it)."""
    overlap, names = examples.overlap(word_hashes(text))
    if not overlap:
        return ""
    counts.contaminated.update(names)
    _write(
        logs["contaminated"],
        source=task.source.label,
        document=_plain(item.id),
        title=_plain(item.title),
        ngrams=overlap,
        files=list(names),
        removed=task.remove_contaminated,
    )
    return "contaminated" if task.remove_contaminated else ""


def _leftovers(item: Document, text: str, counts: _Counts, log: IO[str]) -> None:
    for name, start, end in leftovers.find(text):
        if counts.leftovers[name] < EXAMPLES:
            around = text[max(0, start - 40) : end + 40].replace("\n", "\\n")
            _write(log, document=_plain(item.id), title=_plain(item.title), kind=name, text=around)
        counts.leftovers[name] += 1


def _is_wikipedia(source: Source) -> bool:
    wikipedia = source.kind in ("mediawiki", "wikiextractor")
    return wikipedia or getattr(source, "cleaning", "none") == "wikipedia"


def _quarantine(item: Rejected, source: Source, counts: _Counts, log: IO[str]) -> None:
    counts.dropped[item.reason] += 1
    detail = item.detail[:DETAIL_CHARACTERS]
    _write(log, source=source.label, where=item.where, reason=item.reason, detail=detail)


def _write(log: IO[str], **entry: Any) -> None:
    log.write(json.dumps(entry) + "\n")  # ASCII: surrogates stay escaped


class _Parts:
    """Documents -> part files of at most `part_bytes` of text (or one larger document)."""

    def __init__(self, task: ExtractTask, folder: Path) -> None:
        self._folder = folder
        self._part_bytes = task.part_bytes
        self._seed = task.seed
        self._parts: list[dict[str, Any]] = []
        self._stream: pa.RecordBatchStreamWriter | None = None
        self._index: dict[str, list[Any]] = {name: [] for name in INDEX.names}
        self._batch: list[tuple[str, str, str, str]] = []
        self._batch_bytes = 0
        deduplicate = task.deduplicate
        near = deduplicate.documents == "near"
        self._documents = Items(near) if deduplicate.documents != "none" else None
        near = deduplicate.paragraphs == "near"
        self._paragraphs = Items(near) if deduplicate.paragraphs != "none" else None
        self._places: list[tuple[int, int]] = []  # (document, line) of each paragraph

    def add(self, item: Document, text: str, key: bytes) -> None:
        size = len(text.encode())
        part = self._parts[-1] if self._parts else None
        if part is None or part["bytes"] + size > self._part_bytes:
            self._end_part()
            part = {"file": f"part-{len(self._parts):05d}.arrow", "documents": 0, "bytes": 0}
            self._parts.append(part)
            self._stream = pa.ipc.new_stream(str(self._folder / part["file"]), DOCUMENTS)
        part["documents"] += 1
        part["bytes"] += size
        number = len(self._index["key"])
        for name, value in (
            ("key", key),
            ("draw", draw(key, self._seed, "validation")),
            ("part", len(self._parts) - 1),
            ("characters", len(text)),
            ("bytes", size),
        ):
            self._index[name].append(value)
        if self._documents is not None:
            self._documents.add(key, text)
        if self._paragraphs is not None:
            for line, paragraph in enumerate(text.split("\n")):
                if len(paragraph) >= MIN_PARAGRAPH:
                    self._paragraphs.add(text_hash(paragraph), paragraph)
                    self._places.append((number, line))
        self._batch.append((_plain(item.id), _plain(item.title), _plain(item.url), text))
        self._batch_bytes += size
        if self._batch_bytes >= BATCH_BYTES:
            self._flush()

    def _flush(self) -> None:
        assert self._stream is not None
        if self._batch:
            columns = [list(column) for column in zip(*self._batch, strict=True)]
            self._stream.write_batch(pa.record_batch(columns, schema=DOCUMENTS))
        self._batch, self._batch_bytes = [], 0

    def _end_part(self) -> None:
        if self._stream is not None:
            self._flush()
            self._stream.close()

    def close(self) -> dict[str, Any]:
        """Finish the last part and write what the next stages need of all."""
        self._end_part()
        table = pa.table(self._index, schema=INDEX)
        with pa.ipc.new_stream(str(self._folder / "index.arrow"), INDEX) as stream:
            stream.write_table(table)
        if self._documents is not None:
            self._documents.save(self._folder, "documents")
        if self._paragraphs is not None:
            self._paragraphs.save(self._folder, "paragraphs")
            places = np.array(self._places, dtype=np.uint32).reshape(-1, 2)
            np.save(self._folder / "paragraphs-places.npy", places)
        return {"parts": self._parts, "paragraphs": len(self._places)}


def _plain(text: str) -> str:
    """Ids, titles and links go to Arrow, which takes no lone surrogates."""
    return text.encode("utf-8", "replace").decode()


def read_part(file: Path, keep: npt.NDArray[np.bool_]) -> Iterator[tuple[int, Document]]:
    """(number in the part, document) of those that `keep` [documents] marks, batch by batch."""
    start = 0
    with pa.ipc.open_stream(pa.memory_map(os.fspath(file))) as stream:
        for batch in stream:
            wanted = np.flatnonzero(keep[start : start + len(batch)])
            for number, values in zip(wanted, batch.take(wanted).to_pylist(), strict=True):
                yield start + int(number), Document(**values)
            start += len(batch)
    assert start == len(keep)
