"""Read pieces of inputs, clean and filter their documents, and hash them for deduplication.

A unit writes what `documents` says, and `quarantine.jsonl`, `leftovers.jsonl` and
`contaminated.jsonl`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import starmap
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from data_prep import CorpusError
from data_prep.config import Deduplicate, source_keys
from data_prep.duplicates import decontamination
from data_prep.duplicates.dedup import draw, text_hash
from data_prep.duplicates.minhash import word_hashes
from data_prep.pipeline.stages import examples
from data_prep.pipeline.stages.documents import DocumentWriter, valid
from data_prep.pipeline.units import Planned, Stage, group
from data_prep.pipeline.watchdog import watchdog
from data_prep.sources import Document, Piece, Rejected, Source
from data_prep.sources.document import SKIPPED, told
from data_prep.text import language
from data_prep.text.cleaning import clean
from data_prep.text.wikipedia import leftovers

if TYPE_CHECKING:
    from data_prep.pipeline.plan import Plan

DETAIL_CHARACTERS = 200
EXAMPLES = 20  # so many examples of leftovers, by class
_SAID = 10  # an error names at most this many broken files of a unit
COUNTS = ("dropped", "noted", "leftovers", "contaminated")


@dataclass(frozen=True, slots=True)
class ExtractTask:
    """Hold pieces of one source and the settings for their documents."""

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
    skip: tuple[str, ...] = ()  # the patterns of `skip_documents`


def extract_task(
    plan: Plan, source_number: int, pieces: tuple[Piece, ...], contamination: Path | None = None
) -> ExtractTask:
    """Return how to read pieces of a source; `contamination` holds 13-grams to look for."""
    config = plan.config
    return ExtractTask(
        source_number=source_number,
        source=config.sources[source_number],
        pieces=pieces,
        part_bytes=plan.part_bytes,
        min_characters=config.min_characters,
        max_characters=config.max_characters,
        deduplicate=config.deduplicate,
        contamination=contamination,
        remove_contaminated=bool(config.decontaminate and config.decontaminate.remove),
        seed=config.seed,
    )


def _plan(plan: Plan) -> Iterator[Planned]:
    """Yield units of about `piece_bytes`, each of one source."""
    config = plan.config
    contamination: Path | None = None
    upstream: tuple[str, ...] = ()
    if config.decontaminate is not None:
        contamination = plan.folders("examples")[0] / examples.FILE
        upstream = (plan.digest("examples"),)
    anywhere, by_place = _skipped(plan)
    for source_number, source in enumerate(config.sources):
        found = plan.pieces[source_number]
        for members in group([piece.size for _, _, piece in found], plan.piece_bytes):
            named = tuple(found[member] for member in members)
            pieces = tuple(piece for _, _, piece in named)
            task = extract_task(plan, source_number, pieces, contamination)
            places = starmap(place_of, named)
            skip = (*anywhere, *(entry for place in places for entry in by_place.get(place, ())))
            task = replace(task, skip=skip)
            keys = {
                "source": source_keys(source),
                "part_bytes": plan.part_bytes,
                "characters": [config.min_characters, config.max_characters],
                "levels": [config.deduplicate.documents, config.deduplicate.paragraphs],
                "remove_contaminated": task.remove_contaminated,
                "seed": config.seed,
            } | ({"skip": skip} if skip else {})
            yield Planned(task, keys, upstream, named)


def place_of(source_number: int, name: str, piece: Piece) -> str:
    """Return how `skip_documents` names a piece: SOURCE:INPUT@START."""
    return f"{source_number}:{name}@{piece.start}"


def _skipped(plan: Plan) -> tuple[tuple[str, ...], dict[str, list[str]]]:
    """Return the entries of `skip_documents` for all pieces, and those of one by its place."""
    if not (entries := plan.config.skip_documents):
        return (), {}
    places = {place_of(*each) for found in plan.pieces for each in found}
    by_place: dict[str, list[str]] = {}
    anywhere = []
    for entry in entries:
        ends = (at for at, character in enumerate(entry) if character == "/")
        place = next((entry[:at] for at in ends if entry[:at] in places), None)
        if place is None:
            anywhere.append(entry)
        else:
            by_place.setdefault(place, []).append(entry)
    return tuple(anywhere), by_place


def extract(task: ExtractTask, folder: Path) -> dict[str, Any]:
    """Read, clean and filter the documents of a unit."""
    documents_in = 0
    skip, skipped, errors = set(task.skip), set[str](), list[CorpusError]()
    counts = {name: Counter[str]() for name in COUNTS}
    ngrams = None if task.contamination is None else decontamination.load(task.contamination)
    with ExitStack() as stack:
        logs = {
            name: stack.enter_context((folder / f"{name}.jsonl").open("w", encoding="ascii"))
            for name in ("quarantine", "leftovers", "contaminated")
        }
        note = stack.enter_context(watchdog(folder))
        documents = stack.enter_context(
            closing(DocumentWriter(folder, task.part_bytes, task.deduplicate, task.seed))
        )
        place = ""

        def begin(document: str) -> bool:
            """Note a document, and return whether it is wanted."""
            note(entry := f"{place}/{document}")
            named = skip & {document, entry} if skip else set()
            skipped.update(named)
            return not named

        stack.enter_context(told(begin))
        for piece in task.pieces:
            place = place_of(task.source_number, task.source.input_name(piece), piece)
            for item in _read(task.source, piece, errors):
                documents_in += 1
                if isinstance(item, Document) and not begin(item.id):
                    item = Rejected(item.id, SKIPPED)
                if isinstance(item, Rejected):
                    counts["dropped"][item.reason] += 1
                    _write(
                        logs["quarantine"],
                        source=task.source.label,
                        where=item.where,
                        reason=item.reason,
                        detail=item.detail[:DETAIL_CHARACTERS],
                    )
                    continue
                text = clean(item.text)
                key = text_hash(text)
                reason = _unwanted(text, key, task)
                if not reason and ngrams is not None:
                    overlap, names = ngrams.overlap(word_hashes(text))
                    if overlap:
                        counts["contaminated"].update(names)
                        _write(
                            logs["contaminated"],
                            source=task.source.label,
                            document=valid(item.id),
                            title=valid(item.title),
                            ngrams=overlap,
                            files=list(names),
                            removed=task.remove_contaminated,
                        )
                        reason = "contaminated" if task.remove_contaminated else ""
                if reason:
                    counts["dropped"][reason] += 1
                    continue
                counts["noted"].update(item.notes)
                if task.source.is_wikipedia:
                    for name, start, end in leftovers.find(text):
                        if counts["leftovers"][name] < EXAMPLES:
                            around = text[max(0, start - 40) : end + 40].replace("\n", "\\n")
                            _write(
                                logs["leftovers"],
                                document=valid(item.id),
                                title=valid(item.title),
                                kind=name,
                                text=around,
                            )
                        counts["leftovers"][name] += 1
                documents.add(item, text, key)
    if errors:
        more = f"; and {len(errors) - _SAID} more" if len(errors) > _SAID else ""
        raise CorpusError("; ".join(map(str, errors[:_SAID])) + more)
    result = {"source": task.source_number, **documents.summary, "documents_in": documents_in}
    if skip:
        result["skipped"] = sorted(skipped)
    return result | {name: dict(sorted(of_kind.items())) for name, of_kind in counts.items()}


def _read(source: Source, piece: Piece, errors: list[CorpusError]) -> Iterator[Document | Rejected]:
    """Yield the documents of a piece; an error that ends it is kept, and other pieces are read."""
    try:
        yield from source.documents(piece)
    except CorpusError as error:
        errors.append(error)


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


def _write(log: IO[str], **entry: Any) -> None:
    log.write(json.dumps(entry) + "\n")  # ASCII: surrogates stay escaped


STAGE = Stage("extract", _plan, extract, reads={"examples": ("*",)})
