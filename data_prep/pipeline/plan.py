"""A corpus file -> the units of each stage: content decides them, never the number of workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from data_prep import CorpusError
from data_prep.config import CorpusConfig, TrainTokenizer, source_keys
from data_prep.disk.json_files import canonical_sha256
from data_prep.duplicates import minhash
from data_prep.pipeline.code import BEHAVIOUR, Code, code_of
from data_prep.pipeline.stages.deduplicate import TRAIN, VALIDATION, DeduplicateTask, deduplicate
from data_prep.pipeline.stages.examples import FILE, ExamplesTask, examples
from data_prep.pipeline.stages.extract import ExtractTask, extract
from data_prep.pipeline.stages.match import MatchTask, match
from data_prep.pipeline.stages.pack import PackTask, PartSlice, pack_unit
from data_prep.pipeline.stages.vocabulary import VocabularyTask, vocabulary
from data_prep.pipeline.units import NamedPiece, Record, Unit, group, make_unit
from data_prep.shards.manifest import FileRecord, TokenizerRecord
from data_prep.sources import Piece, name_of, pieces
from data_prep.tokens import load

PART_BYTES = 32 * 2**20  # of text, before it is tokenised into a shard
# As stored. Reading is slower than packing, inputs may be compressed, and the last units of a stage
# keep few workers busy: these are smaller.
PIECE_BYTES = 5 * 2**20
HASHES_AT_ONCE = 2_000_000  # 24 bytes each, and as much again to sort them

StageName = Literal["examples", "extract", "match", "deduplicate", "vocabulary", "pack"]
_READS: dict[StageName | Literal["finish"], dict[StageName, tuple[str, ...]]] = {
    "examples": {},
    "extract": {"examples": ("*",)},
    "match": {"extract": ("documents-*", "paragraphs-*")},
    "deduplicate": {"extract": ("index.arrow", "*-places-*"), "match": ("*",)},
    "vocabulary": {"extract": ("index.arrow", "part-*"), "deduplicate": ("*-fates.npy",)},
    "pack": {"extract": ("part-*",), "deduplicate": ("*",), "vocabulary": ("*",)},
    "finish": {"extract": ("*.jsonl",), "vocabulary": ("*",), "pack": ("*",)},
}
FUNCTIONS: dict[StageName, Callable[[Any, Path], dict[str, Any]]] = {
    "examples": examples,
    "extract": extract,
    "match": match,
    "deduplicate": deduplicate,
    "vocabulary": vocabulary,
    "pack": pack_unit,
}


class Plan:
    """The units of a corpus. Those of a stage can be known once the stages before it are done."""

    def __init__(
        self, config: CorpusConfig, part_bytes: int = PART_BYTES, piece_bytes: int = PIECE_BYTES
    ) -> None:
        self.config = config
        self.work = config.output / ".work"
        self._part_bytes = part_bytes
        self._piece_bytes = min(piece_bytes, part_bytes)
        self.pieces: list[list[NamedPiece]] = [
            [(number, name_of(source, piece), piece) for piece in pieces(source, self._piece_bytes)]
            for number, source in enumerate(config.sources)
        ]
        # Now, not stage by stage: files may be edited while this process goes on with what it read.
        self.code: dict[str, Code] = {stage: code_of(stage) for stage in BEHAVIOUR}
        self._units: dict[StageName, list[Unit]] = {}
        self._records: dict[StageName, list[Record]] = {}

    def units(self, stage: StageName) -> list[Unit]:
        """Return the stage's units; CorpusError while an earlier stage is not complete."""
        if stage not in self._units:
            self._units[stage] = getattr(self, f"_{stage}")()
        return self._units[stage]

    def finished(self, stage: StageName, records: Sequence[Record]) -> None:
        """Take the records of a stage that was just run, instead of reading them."""
        self._records[stage] = list(records)

    def records(self, stage: StageName) -> list[Record]:
        """Return what the stage's units wrote; CorpusError if one is missing."""
        if stage not in self._records:
            found = [unit.record() for unit in self.units(stage)]
            missing = sum(record is None for record in found)
            if missing and (others := self.of_other_code(stage)):
                raise CorpusError(
                    f"{self.config.output}: {len(others)} of {len(found)} units of stage {stage} "
                    f"were made by other code ({others[min(others)]}): go on with that code, or "
                    f"run `distil prepare CONFIG --stage {stage}` again with this"
                )
            if missing:
                raise CorpusError(
                    f"{self.config.output}: {missing} of {len(found)} units of stage {stage} are "
                    f"missing: run `distil prepare CONFIG --stage {stage}` for all its tasks first"
                )
            self._records[stage] = [record for record in found if record is not None]
        return self._records[stage]

    def of_other_code(self, stage: StageName) -> dict[int, str]:
        """Return the numbers of the units that other code left on disk, and how it differs."""
        found = {unit.number: unit.other_code() for unit in self.units(stage)}
        return {number: difference for number, difference in found.items() if difference}

    def folders(self, stage: StageName) -> tuple[Path, ...]:
        """Return where the stage's units wrote."""
        return tuple(unit.folder for unit in self.units(stage))

    def _unit(
        self,
        stage: StageName,
        number: int,
        task: Any,
        *,
        upstream: tuple[str, ...] = (),
        pieces: tuple[NamedPiece, ...] = (),
        **keys: Any,
    ) -> Unit:
        return make_unit(stage, number, task, self.work / stage, keys, upstream, pieces)

    def _digest(self, stage: StageName) -> str:
        return (
            f"stage {stage}: {canonical_sha256([record.digest for record in self.records(stage)])}"
        )

    @cached_property
    def tokenizer(self) -> TokenizerRecord | None:
        """Return the tokenizer that was named, None if one is trained; or raise CorpusError."""
        named = self.config.tokenizer
        return None if isinstance(named, TrainTokenizer) else load(named).record()

    @property
    def examples(self) -> list[NamedPiece]:
        """Return the evaluation files, each whole."""
        settings = self.config.decontaminate
        files = () if settings is None else settings.files
        return [
            (number, file.name, Piece(str(file), 0, None, _size(file)))
            for number, file in enumerate(files)
        ]

    def _examples(self) -> list[Unit]:
        if self.config.decontaminate is None:
            return []
        task = ExamplesTask(self.config.decontaminate.files)
        return [self._unit("examples", 0, task, pieces=tuple(self.examples))]

    def read_by(
        self, stage: StageName | Literal["finish"], units: Sequence[Unit]
    ) -> Iterator[tuple[StageName, Unit, Record, list[FileRecord]]]:
        """Yield what a stage, or some units of it, read of earlier stages: by unit, the outputs."""
        parts = {part.file for unit in units if stage == "pack" for part in unit.task.slices}
        trains = isinstance(self.config.tokenizer, TrainTokenizer)
        for earlier, patterns in _READS[stage].items() if stage != "vocabulary" or trains else ():
            for unit, record in zip(self.units(earlier), self.records(earlier), strict=True):
                outputs = [
                    output
                    for output in record.outputs
                    if any(fnmatch(output.file, pattern) for pattern in patterns)
                    and (not parts or earlier != "extract" or unit.folder / output.file in parts)
                ]
                yield earlier, unit, record, outputs

    def extract_task(
        self, source_number: int, pieces: tuple[Piece, ...], contamination: Path | None = None
    ) -> ExtractTask:
        """Return how pieces of a source are read; `contamination` holds 13-grams to look for."""
        config = self.config
        return ExtractTask(
            source_number=source_number,
            source=config.sources[source_number],
            pieces=pieces,
            part_bytes=self._part_bytes,
            min_characters=config.min_characters,
            max_characters=config.max_characters,
            deduplicate=config.deduplicate,
            contamination=contamination,
            remove_contaminated=bool(config.decontaminate and config.decontaminate.remove),
            seed=config.seed,
        )

    def _extract(self) -> list[Unit]:
        config = self.config
        contamination = None
        upstream: tuple[str, ...] = ()
        if config.decontaminate is not None:
            contamination = self.folders("examples")[0] / FILE
            upstream = (self._digest("examples"),)
        units: list[Unit] = []
        for source_number, source in enumerate(config.sources):
            found = self.pieces[source_number]
            for members in group([piece.size for _, _, piece in found], self._piece_bytes):
                mine = tuple(found[member] for member in members)
                own = tuple(piece for _, _, piece in mine)
                task = self.extract_task(source_number, own, contamination)
                unit = self._unit(
                    "extract",
                    len(units),
                    task,
                    source=source_keys(source),
                    part_bytes=self._part_bytes,
                    characters=[config.min_characters, config.max_characters],
                    levels=[config.deduplicate.documents, config.deduplicate.paragraphs],
                    remove_contaminated=task.remove_contaminated,
                    seed=config.seed,
                    upstream=upstream,
                    pieces=mine,
                )
                units.append(unit)
        return units

    def _bounds(self, level: str) -> tuple[int, ...]:
        """Return the number of each extracted unit's first item, and of all items."""
        counts = [
            sum(part["documents"] for part in record.result["parts"])
            if level == "documents"
            else record.result["paragraphs"]
            for record in self.records("extract")
        ]
        return tuple(np.cumsum([0, *counts]).tolist())

    def _levels(self) -> list[str]:
        settings = self.config.deduplicate
        return [
            level for level in ("documents", "paragraphs") if getattr(settings, level) != "none"
        ]

    def _match(self) -> list[Unit]:
        units: list[Unit] = []
        folders, upstream = self.folders("extract"), (self._digest("extract"),)
        for level in self._levels():
            how = getattr(self.config.deduplicate, level)
            bounds = self._bounds(level)
            hashes = bounds[-1] * (minhash.NUM_BANDS if how == "near" else 1)
            slices = max(1, -(-hashes // HASHES_AT_ONCE))
            for number in range(slices):
                task = MatchTask(
                    level=level,
                    how=how,
                    threshold=self.config.deduplicate.threshold,
                    folders=folders,
                    bounds=bounds,
                    slice_number=number,
                    slices=slices,
                )
                unit = self._unit(
                    "match",
                    len(units),
                    task,
                    level=level,
                    how=how,
                    threshold=self.config.deduplicate.threshold if how == "near" else None,
                    slice=[number, slices],
                    upstream=upstream,
                )
                units.append(unit)
        return units

    def _deduplicate(self) -> list[Unit]:
        of_level = {
            level: tuple(u.folder for u in self.units("match") if u.task.level == level)
            for level in ("documents", "paragraphs")
        }
        task = DeduplicateTask(
            extracted=self.folders("extract"),
            bounds=self._bounds("documents"),
            documents=of_level["documents"],
            paragraphs=of_level["paragraphs"],
            paragraph_bounds=self._bounds("paragraphs"),
            validation=self.config.validation,
            seed=self.config.seed,
        )
        return [
            self._unit(
                "deduplicate",
                0,
                task,
                validation=self.config.validation,
                seed=self.config.seed,
                upstream=(self._digest("extract"), self._digest("match")),
            )
        ]

    def _vocabulary(self) -> list[Unit]:
        config = self.config
        longest = max(config.row_lengths)
        if not isinstance(config.tokenizer, TrainTokenizer):
            assert self.tokenizer is not None
            record = self.tokenizer.model_dump(mode="json")
            task = VocabularyTask(config.tokenizer, longest, (), (), (), 0, config.seed)
            return [self._unit("vocabulary", 0, task, tokenizer=record, longest=longest)]
        of_units = self._deduplicated()
        task = VocabularyTask(
            tokenizer=config.tokenizer.train,
            model_max_length=longest,
            extracted=self.folders("extract"),
            part_names=tuple(
                tuple(part["file"] for part in record.result["parts"])
                for record in self.records("extract")
            ),
            fates=tuple(self._fates(number) for number in range(len(of_units))),
            train_bytes=sum(sum(unit["parts"][TRAIN]) for unit in of_units),
            seed=config.seed,
        )
        return [
            self._unit(
                "vocabulary",
                0,
                task,
                train=config.tokenizer.train.model_dump(),
                longest=longest,
                seed=config.seed,
                upstream=(self._digest("extract"), self._digest("deduplicate")),
            )
        ]

    def _deduplicated(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.records("deduplicate")[0].result["units"]
        return found

    def _fates(self, unit: int) -> Path:
        return self.folders("deduplicate")[0] / f"{unit:06d}-fates.npy"

    def _slices(self) -> list[tuple[PartSlice, list[int], tuple[str, ...]]]:
        """(part, its bytes of each split, digests of what it is read from), in document order."""
        (deduplicated,) = self.records("deduplicate")
        sha256 = {output.file: output.sha256 for output in deduplicated.outputs}
        folders = self.folders("extract")
        slices: list[tuple[PartSlice, list[int], tuple[str, ...]]] = []
        for unit, record in enumerate(self.records("extract")):
            source = self.config.sources[record.result["source"]]
            taken_out = self._fates(unit).with_name(f"{unit:06d}-paragraphs.npy")
            upstream = (
                f"unit extract/{unit}: {record.digest}",
                *(
                    f"file {name}: {sha256[name]}"
                    for name in (self._fates(unit).name, taken_out.name)
                ),
            )
            last = 0
            sizes = deduplicated.result["units"][unit]["parts"]
            for number, part in enumerate(record.result["parts"]):
                first, last = last, last + part["documents"]
                slices.append(
                    (
                        PartSlice(
                            file=folders[unit] / part["file"],
                            source_number=record.result["source"],
                            by_line=source.kind == "sentences",
                            fates=self._fates(unit),
                            taken_out=taken_out,
                            first=first,
                            last=last,
                        ),
                        [of_split[number] for of_split in sizes],
                        upstream,
                    )
                )
        return slices

    def _pack(self) -> list[Unit]:
        """Join parts until they hold `part_bytes` of a split, so that few rows end half empty."""
        units: list[Unit] = []
        splits: tuple[tuple[Literal["train", "validation"], int], ...] = (
            ("train", TRAIN),
            ("validation", VALIDATION),
        )
        (tokenizer,) = self.records("vocabulary")
        slices = self._slices()
        for split, number in splits:
            chosen = [item for item in slices if item[1][number]]
            for members in group([sizes[number] for _, sizes, _ in chosen], self._part_bytes):
                mine = [chosen[member] for member in members]
                task = PackTask(
                    split=split,
                    slices=tuple(part for part, _, _ in mine),
                    tokenizer=self.folders("vocabulary")[0],
                    row_lengths=self.config.row_lengths,
                )
                parts = [
                    [part.file.name, part.source_number, part.by_line, part.first, part.last]
                    for part in task.slices
                ]
                unit = self._unit(
                    "pack",
                    len(units),
                    task,
                    split=split,
                    parts=parts,
                    row_lengths=self.config.row_lengths,
                    upstream=tuple(
                        dict.fromkeys(
                            [
                                f"unit vocabulary/0: {tokenizer.digest}",
                                *(d for _, _, digests in mine for d in digests),
                            ]
                        )
                    ),
                )
                units.append(unit)
        return units


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:
        raise CorpusError(
            f"decontaminate.files: {file}: cannot be read: {error.strerror}"
        ) from None
