"""Pieces of inputs -> cleaned, filtered documents, and what finds their duplicates.

A unit writes what `documents` says, and `quarantine.jsonl`, `leftovers.jsonl` and
`contaminated.jsonl`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from data_prep.config import Deduplicate
from data_prep.duplicates import decontamination
from data_prep.duplicates.decontamination import Contamination
from data_prep.duplicates.dedup import draw, text_hash
from data_prep.duplicates.minhash import word_hashes
from data_prep.pipeline.stages.documents import DocumentWriter, valid
from data_prep.pipeline.watchdog import Watchdog
from data_prep.sources import Document, Piece, Rejected, Source, read
from data_prep.text import language
from data_prep.text.cleaning import clean
from data_prep.text.wikipedia import leftovers

DETAIL_CHARACTERS = 200
EXAMPLES = 20  # of leftovers, by class


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
        documents = stack.enter_context(
            closing(DocumentWriter(folder, task.part_bytes, task.deduplicate, task.seed))
        )
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
                documents.add(item, text, key)
    return {"source": task.source_number, **documents.summary, **counts.as_json()}


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
    """Return the reason to drop a document that overlaps an evaluation file ("" to keep it)."""
    overlap, names = examples.overlap(word_hashes(text))
    if not overlap:
        return ""
    counts.contaminated.update(names)
    _write(
        logs["contaminated"],
        source=task.source.label,
        document=valid(item.id),
        title=valid(item.title),
        ngrams=overlap,
        files=list(names),
        removed=task.remove_contaminated,
    )
    return "contaminated" if task.remove_contaminated else ""


def _leftovers(item: Document, text: str, counts: _Counts, log: IO[str]) -> None:
    for name, start, end in leftovers.find(text):
        if counts.leftovers[name] < EXAMPLES:
            around = text[max(0, start - 40) : end + 40].replace("\n", "\\n")
            _write(log, document=valid(item.id), title=valid(item.title), kind=name, text=around)
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
