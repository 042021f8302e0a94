"""Estimate tokens, rows, disk and time of a corpus from a sample of it."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.config import CorpusConfig, TrainTokenizer
from data_prep.pipeline.engines import started
from data_prep.pipeline.packing import pack, split_tokens
from data_prep.pipeline.plan import Plan
from data_prep.pipeline.stages.documents import read_part
from data_prep.pipeline.stages.extract import ExtractTask, extract, extract_task
from data_prep.sources import Document, Piece, Source
from data_prep.sources.files import decompressed, is_compressed, opened
from data_prep.tokens import load
from data_prep.tokens.training import train_tokenizer

SAMPLE_BYTES = 2**22  # as stored, of each source
PIECE_BYTES = 2**19


@dataclass(frozen=True, slots=True)
class SourceEstimate:
    """Hold the estimate of a source, scaled up from the `share` of its stored bytes that was read.

    `rows` and `fill` are by row length. `seconds` are of one worker, and `longest` those of the
    largest unit of extraction. `is_beginning`: only the beginning of a large compressed file was
    read.
    """

    name: str
    stored_bytes: int
    share: float
    documents: int
    kept: int
    dropped: dict[str, int]  # in the sample
    words: int
    tokens: int
    unknown: float
    rows: dict[int, int]
    fill: dict[int, float]
    text_bytes: int
    seconds: float
    longest: float
    is_beginning: bool


@dataclass(frozen=True, slots=True)
class Estimate:
    """Hold all sources, the bytes of the shards, and of the work folder at its largest."""

    sources: tuple[SourceEstimate, ...]
    shard_bytes: int
    work_bytes: int
    seconds: float
    vocab_size: int
    trained: bool


def estimate(config: CorpusConfig) -> Estimate:
    """Read, clean and tokenise a sample of each source as `prepare` would.

    Duplicates show in the whole corpus only, so none are taken off.
    """
    plan = Plan(config, piece_bytes=PIECE_BYTES)
    plan.check_sources()
    named = config.tokenizer
    # One that does not load is found before anything is read.
    tokens = None if isinstance(named, TrainTokenizer) else load(named)
    with tempfile.TemporaryDirectory(prefix="distil-") as name:
        folder = Path(name)
        numbers = range(len(config.sources))
        samples = [_extracted(config, plan, number, folder) for number in numbers]
        if isinstance(named, TrainTokenizer):
            tokens = train_tokenizer(
                lambda: (doc.text for sample in samples for doc in _documents(sample)), named.train
            )
        assert tokens is not None
        tokens.accelerate([document.text[:1000] for document in _documents(samples[0])][:100])

        # A sample's counts are scaled up by the share of the stored bytes that was read.
        sources = []
        for sample in samples:
            start = time.perf_counter()
            words = num_tokens = unknown = text_bytes = kept = 0
            lengths: dict[int, list[int]] = {length: [] for length in config.row_lengths}
            for document in _documents(sample):
                ids = tokens.encode(document.text)
                kept += 1
                words += len(document.text.split())
                text_bytes += len(document.text.encode())
                num_tokens += len(ids)
                unknown += int((ids == tokens.special_ids.unk).sum())
                for row_length, of_row in lengths.items():
                    of_row += [len(piece) + 2 for piece in split_tokens(ids, row_length - 2)]
            packed = {length: len(pack(of_row, length)) for length, of_row in lengths.items()}
            seconds = sample.seconds + time.perf_counter() - start
            read, stored = sample.sampled_bytes, sample.stored_bytes
            share = min(1.0, read / stored) if stored else 1.0
            dropped = sum((Counter(result["dropped"]) for result in sample.results), Counter[str]())
            sources.append(
                SourceEstimate(
                    name=sample.source.label,
                    stored_bytes=stored,
                    share=share,
                    documents=round(sum(found["documents_in"] for found in sample.results) / share),
                    kept=round(kept / share),
                    dropped=dict(sorted(dropped.items())),
                    words=round(words / share),
                    tokens=round((num_tokens + 2 * kept) / share),
                    unknown=unknown / max(num_tokens, 1),
                    rows={length: round(count / share) for length, count in packed.items()},
                    fill={
                        length: sum(lengths[length]) / max(1, count * length)
                        for length, count in packed.items()
                    },
                    text_bytes=round(text_bytes / share),
                    seconds=seconds / share,
                    longest=sample.seconds / share * sample.largest / max(stored, 1),
                    is_beginning=sample.is_beginning,
                )
            )

    width = 2 if len(tokens.vocabulary) <= 2**16 else 4
    rows = Counter[int]()
    for source in sources:
        rows.update(source.rows)
    shard_bytes = sum(count * length * width for length, count in rows.items())
    if config.keep_text:  # at most: of documents that are cut, no text is kept
        shard_bytes += len(rows) * sum(source.text_bytes for source in sources)
    hashes = 1200 if config.deduplicate.documents == "near" else 60  # bytes a document
    text = sum(source.text_bytes + source.kept * hashes for source in sources)
    return Estimate(
        sources=tuple(sources),
        shard_bytes=shard_bytes,
        work_bytes=text + shard_bytes,
        # A unit is one worker's, however many there are.
        seconds=max(
            [
                sum(source.seconds for source in sources) / config.workers,
                *(source.longest for source in sources),
            ]
        ),
        vocab_size=len(tokens.vocabulary),
        trained=isinstance(named, TrainTokenizer),
    )


@dataclass(frozen=True, slots=True)
class _Sample:
    source: Source
    stored_bytes: int
    sampled_bytes: int
    folders: tuple[Path, ...]
    results: tuple[dict[str, Any], ...]
    seconds: float  # time of extraction
    largest: int  # bytes of the largest unit
    is_beginning: bool


def _extracted(config: CorpusConfig, plan: Plan, number: int, folder: Path) -> _Sample:
    """Extract pieces spread evenly over a source."""
    source, pieces = config.sources[number], [piece for _, _, piece in plan.pieces[number]]
    total = sum(piece.size for piece in pieces)
    wanted = max(1, min(len(pieces), round(SAMPLE_BYTES * len(pieces) / max(total, 1))))
    chosen = [pieces[i * len(pieces) // wanted] for i in range(wanted)]
    sampled, is_beginning = 0, False
    jobs = []
    for place, piece in enumerate(chosen):
        path = folder / f"{number}-{place}"
        path.mkdir()
        of = source
        if piece.size > SAMPLE_BYTES and is_compressed(piece.path):
            # The beginning of the file, to a document's end.
            is_beginning = True
            head = path / Path(piece.path).with_suffix("").name
            chunks: list[bytes] = []
            size = stored = 0
            with opened(piece.path) as file:
                for chunk in decompressed(file, piece.path):
                    # What was read of the file has been decompressed when more of it is read.
                    enough = size >= SAMPLE_BYTES and file.tell() > stored
                    if enough or size >= 16 * SAMPLE_BYTES:
                        break
                    stored = file.tell()
                    chunks.append(chunk)
                    size += len(chunk)
            data = b"".join(chunks)
            marker, end = source.record_end
            cut_at = data.rfind(marker)
            head.write_bytes(data[: cut_at + len(marker)] + end if cut_at >= 0 else data)
            sampled += stored
            piece = Piece(str(head), 0, None, head.stat().st_size)
            of = source.model_copy(update={"path": str(head)})
        else:
            sampled += piece.size
        jobs.append((replace(extract_task(plan, number, (piece,)), source=of), path))
    with started(config.workers) as run:
        found = run(_timed, jobs, lambda done, total: None)
    return _Sample(
        source,
        total,
        sampled,
        tuple(path for _, path in jobs),
        tuple(result for result, _ in found),
        sum(seconds for _, seconds in found),
        max(piece.size for piece in pieces),
        is_beginning,
    )


def _timed(job: tuple[ExtractTask, Path]) -> tuple[dict[str, Any], float]:
    start = time.perf_counter()
    return extract(*job), time.perf_counter() - start


def _documents(sample: _Sample) -> Iterator[Document]:
    for folder, result in zip(sample.folders, sample.results, strict=True):
        for part in result["parts"]:
            everything = np.ones(part["documents"], dtype=bool)
            yield from (document for _, document in read_part(folder / part["file"], everything))
