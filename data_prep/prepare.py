"""A corpus file -> a finished folder of shards: the same bytes from any number of workers."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from data_prep import CorpusError
from data_prep.config import CorpusConfig, TrainTokenizer, TrainWordPiece
from data_prep.dedup import draw, first_of_each
from data_prep.engines import run
from data_prep.extract import Extracted, ExtractUnit, Part, extract, read_part
from data_prep.finish import find_finished, finish, work_folder
from data_prep.plan import group
from data_prep.rows import PartSlice, RowsResult, RowsUnit, write_rows
from data_prep.shards import Manifest
from data_prep.shards.manifest import SourceRecord
from data_prep.sources import inputs
from data_prep.tokens import Tokens, load
from data_prep.vocabulary import train

PART_BYTES = 32 * 2**20
# A vocabulary needs no more text than this, and the trainer's memory grows with its words.
VOCABULARY_BYTES = 2**30

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Kept:
    """A part and the documents of it that survived deduplication."""

    part: Part
    keep: npt.NDArray[np.bool_]

    def of(self, split: Literal["train", "validation"]) -> npt.NDArray[np.bool_]:
        """Mark the kept documents of one split."""
        in_split = self.part.validation if split == "validation" else ~self.part.validation
        return np.logical_and(self.keep, in_split)


def prepare(
    config: CorpusConfig, progress: Progress | None = None, part_bytes: int = PART_BYTES
) -> Manifest:
    """Make `config.output`, or return its manifest if it already holds this corpus.

    `progress(stage, done, total)` is called as units of work end. Raises CorpusError for anything
    the user must mend; OSError (disk full, read-only) passes through. Finished shards of another
    configuration are never overwritten.
    """
    report = progress or (lambda stage, done, total: None)
    source_inputs = [inputs(source) for source in config.sources]
    if finished := find_finished(config, source_inputs):
        return finished
    tokens = None if isinstance(config.tokenizer, TrainTokenizer) else load(config.tokenizer)
    with work_folder(config.output) as work:
        units = _extract_units(config, source_inputs, work, part_bytes)
        extracted = run(extract, units, config.workers, _stage(report, "read"))
        kept = _deduplicate(extracted)
        if not any(part.of("train").any() for part in kept):
            raise _no_rows(config, extracted)
        if tokens is None:
            assert isinstance(config.tokenizer, TrainTokenizer)
            report("train the vocabulary", 0, 1)
            tokens = _train(kept, config.tokenizer.train, config.seed)
            report("train the vocabulary", 1, 1)
        tokens.save(work / "final" / "tokenizer", config.row_length)
        rows_units = _rows_units(config, kept, tokens, work, part_bytes)
        results = run(write_rows, rows_units, config.workers, _stage(report, "tokenise and pack"))
        if not any(result.shard and result.unit.split == "train" for result in results):
            raise _no_rows(config, extracted)
        records = _source_records(config, extracted, kept, results)
        return finish(config, tokens, extracted, results, records, work)


def _stage(report: Progress, stage: str) -> Callable[[int, int], None]:
    return lambda done, total: report(stage, done, total)


def _extract_units(
    config: CorpusConfig, source_inputs: Sequence[list[str]], work: Path, part_bytes: int
) -> list[ExtractUnit]:
    """Small inputs of a source share a unit; a large one has its own.

    Reading is slower than packing and inputs may be compressed: units here are smaller.
    """
    (work / "documents").mkdir()
    units: list[ExtractUnit] = []
    for source_number, (source, names) in enumerate(
        zip(config.sources, source_inputs, strict=True)
    ):
        sizes = [
            Path(name).stat().st_size if Path(name).is_file() else part_bytes for name in names
        ]
        for members in group(sizes, part_bytes // 4):
            units.append(
                ExtractUnit(
                    number=len(units),
                    source_number=source_number,
                    source=source,
                    inputs=tuple(names[member] for member in members),
                    stem=work / "documents" / f"{len(units):06d}",
                    part_bytes=part_bytes,
                    min_characters=config.min_characters,
                    max_characters=config.max_characters,
                    validation=config.validation,
                    seed=config.seed,
                )
            )
    return units


def _deduplicate(extracted: Sequence[Extracted]) -> list[Kept]:
    """Keep the first of equal texts, in the order of sources, inputs and documents."""
    parts = [part for result in extracted for part in result.parts]
    if not parts:
        return []
    keep = first_of_each(np.concatenate([part.keys for part in parts]))
    ends = np.cumsum([len(part.keys) for part in parts])
    return [
        Kept(part, keep[end - len(part.keys) : end]) for part, end in zip(parts, ends, strict=True)
    ]


def _no_rows(config: CorpusConfig, extracted: Sequence[Extracted]) -> CorpusError:
    return CorpusError(
        f"{config.output}: no training row: {_losses(extracted)}: "
        "add text, or loosen `min_characters`, `fraction` or `validation`"
    )


def _train(kept: Sequence[Kept], settings: TrainWordPiece, seed: int) -> Tokens:
    masks = [(document.part, document.of("train")) for document in kept]
    total = sum(int(part.sizes[mask].sum()) for part, mask in masks)
    share = VOCABULARY_BYTES / max(total, 1)
    if share < 1:
        for part, mask in masks:
            chosen = (draw(key.tobytes(), seed, "vocabulary") < share for key in part.keys)
            mask &= np.fromiter(chosen, dtype=bool, count=len(mask))

    def texts() -> Iterator[str]:
        for part, mask in masks:
            for document in read_part(part.file, mask):
                yield document.text

    return train(texts, settings)


def _rows_units(
    config: CorpusConfig, kept: Sequence[Kept], tokens: Tokens, work: Path, part_bytes: int
) -> list[RowsUnit]:
    """Join parts until they hold `part_bytes` of a split, so that few rows end half empty."""
    folder = work / "rows"
    folder.mkdir()
    dtype = "uint16" if len(tokens.vocabulary) <= 2**16 else "uint32"
    units: list[RowsUnit] = []
    splits: tuple[Literal["train", "validation"], ...] = ("train", "validation")
    for split in splits:
        masks = [document.of(split) for document in kept]
        chosen = [number for number, mask in enumerate(masks) if mask.any()]
        sizes = [int(kept[number].part.sizes[masks[number]].sum()) for number in chosen]
        for shard, members in enumerate(group(sizes, part_bytes)):
            slices = []
            for number in (chosen[member] for member in members):
                part = kept[number].part
                by_line = config.sources[part.source_number].kind == "sentences"
                slices.append(PartSlice(part.file, part.source_number, by_line, masks[number]))
            units.append(
                RowsUnit(
                    split=split,
                    number=shard,
                    slices=tuple(slices),
                    tokenizer=work / "final" / "tokenizer",
                    row_length=config.row_length,
                    dtype=dtype,
                    folder=folder,
                )
            )
    return units


def _source_records(
    config: CorpusConfig,
    extracted: Sequence[Extracted],
    kept: Sequence[Kept],
    results: Sequence[RowsResult],
) -> list[SourceRecord]:
    """Account for every document: in = kept + dropped, by reason."""
    records = []
    for number, source in enumerate(config.sources):
        mine = [result for result in extracted if result.source_number == number]
        parts = [document for document in kept if document.part.source_number == number]
        dropped: Counter[str] = sum((result.dropped for result in mine), Counter())
        dropped["duplicate"] = sum(int((~document.keep).sum()) for document in parts)
        dropped["no tokens"] = sum(result.without_tokens[number] for result in results)
        survivors = sum(int(document.keep.sum()) for document in parts)
        record = SourceRecord(
            name=source.label,
            kind=source.kind,
            licence=source.licence,
            documents_in=sum(result.documents_in for result in mine),
            documents_kept=survivors - dropped["no tokens"],
            documents_validation=sum(int(d.of("validation").sum()) for d in parts)
            - sum(
                result.without_tokens[number]
                for result in results
                if result.unit.split == "validation"
            ),
            dropped={reason: count for reason, count in sorted(dropped.items()) if count},
            characters=sum(int(d.part.characters[d.keep].sum()) for d in parts),
        )
        assert record.documents_in == record.documents_kept + sum(record.dropped.values())
        records.append(record)
    return records


def _losses(extracted: Sequence[Extracted]) -> str:
    dropped: Counter[str] = sum((result.dropped for result in extracted), Counter())
    documents = sum(result.documents_in for result in extracted)
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()))
    return f"{documents} documents read" + (f" ({reasons})" if reasons else "")
