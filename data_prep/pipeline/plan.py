"""Plan the units of each stage from a corpus file, whatever the number of workers.

Where files are cut is kept, so that later runs read no index and no footer of them again.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any

from data_prep import CorpusError
from data_prep.config import SHAPES_NOTHING, CorpusConfig, TrainTokenizer
from data_prep.disk.json_files import (
    canonical_sha256,
    parse_object,
    read_regular,
    self_sha256,
    write_json,
)
from data_prep.messages import megabytes, one_line
from data_prep.pipeline.code import BEHAVIOUR, Code, code_of
from data_prep.pipeline.stages import deduplicate, examples, extract, match, pack, vocabulary
from data_prep.pipeline.store import Needed, Store, name_of
from data_prep.pipeline.units import NamedPiece, Stage, Unit, UnitRecord
from data_prep.shards.manifest import TokenizerRecord
from data_prep.sources import Piece, Source
from data_prep.sources.kind import FileSource
from data_prep.sources.remote import looked_up_once
from data_prep.tokens import load

_BEHAVIOUR = 2  # version of what cuts files; raise it when they are cut elsewhere
_LONG = 2e9  # bytes


class Cuts:
    """Hold the pieces of files by the keys of their source, path, version and the size of pieces.

    A file whose version is not known or has changed is cut again, and so are all if the file that
    keeps them is missing or damaged.
    """

    def __init__(self, file: Path, tell: Callable[[str], None]) -> None:
        self._file, self._tell = file, tell
        # By key, of each piece: the number of its class, start, end and size.
        self._kept: dict[str, list[tuple[int, int, int | None, int]]] = {}
        self._is_new = False
        try:
            values = parse_object(read_regular(file))
            if values["self_sha256"] == self_sha256(values):
                self._kept = values["cuts"]
        except (OSError, ValueError, KeyError):
            pass

    def inputs(self, source: Source, limit: int) -> Sequence[Piece]:
        """Return `source.inputs(limit)`."""
        if type(source).inputs is not FileSource.inputs:
            return source.inputs(limit)
        with looked_up_once():
            return [piece for file in source.files() for piece in self._cut(source, file, limit)]

    def _cut(self, source: FileSource, file: Piece, limit: int) -> list[Piece]:
        if not source.cut_by_content:
            return source.cut(file, limit)
        version = file.version()
        keys = source.model_dump(mode="json")  # with the columns that a footer must name
        own = [_BEHAVIOUR, file.path, version, file.size, source.cut_by(file), limit]
        key = canonical_sha256([keys, *own])
        if version and key in self._kept:
            return [
                source.pieces[kind](file.path, start, end, size)
                for kind, start, end, size in self._kept[key]
            ]
        pieces = source.cut(file, limit)
        if len(pieces) == 1 and file.size > _LONG:
            self._tell(
                f"{one_line(file.path)}: {megabytes(file.size)} MB are one unit of work: "
                "there is no place to cut; of a dump take the multistream file and its index"
            )
        if version:
            self._kept[key] = [
                (source.pieces.index(type(piece)), piece.start, piece.end, piece.size)
                for piece in pieces
            ]
            self._is_new = True
        return pieces

    def save(self) -> None:
        """Write what was cut since the file was read."""
        if self._is_new:
            values: dict[str, Any] = {"cuts": self._kept}
            fresh = self._file.with_name(f".{self._file.name}-{uuid.uuid4().hex[:8]}")
            write_json(fresh, values | {"self_sha256": self_sha256(values)})
            os.replace(fresh, self._file)  # atomic: other tasks write this file, too
            self._is_new = False


PART_BYTES = 32 * 2**20  # bytes of text, before it is tokenised into a shard
# As stored. Reading is slower than packing, inputs may be compressed, and the last units of a stage
# keep few workers busy: these are smaller.
PIECE_BYTES = 5 * 2**20

# In the order in which they run; `finish` puts their outputs together.
STAGES: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        examples.STAGE,
        extract.STAGE,
        match.STAGE,
        deduplicate.STAGE,
        vocabulary.STAGE,
        pack.STAGE,
    )
}


class Plan:
    """Hold the units of a corpus; those of a stage are known once all earlier stages are done."""

    def __init__(
        self,
        config: CorpusConfig,
        part_bytes: int = PART_BYTES,
        piece_bytes: int = PIECE_BYTES,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.config = config
        self.work = config.output / ".work"
        self.store: Store | None = None
        if config.work is not None:
            # Its settings, the places of its inputs among them, whatever the machine. A document
            # that is left out changes few units.
            kept = config.model_dump(mode="json", exclude=SHAPES_NOTHING | {"skip_documents"})
            self.store = Store(f"{config.work.rstrip('/')}/{canonical_sha256(kept)[:16]}")
        self.part_bytes = part_bytes
        self.piece_bytes = min(piece_bytes, part_bytes)
        self.cuts = Cuts(self.work / "cuts.json", tell)
        cut = self.cuts.inputs
        self.pieces: list[list[NamedPiece]] = [
            [(number, source.input_name(piece), piece) for piece in cut(source, self.piece_bytes)]
            for number, source in enumerate(config.sources)
        ]
        # Hash all code at the start: source files may be edited during the run.
        self.code: dict[str, Code] = {stage: code_of(stage) for stage in BEHAVIOUR}
        self._units: dict[str, list[Unit]] = {}
        self._records: dict[str, list[UnitRecord]] = {}
        self._stored: dict[tuple[str, int], bytes] = {}  # records in the store

    def check_sources(self) -> None:
        """Refuse a mistake in a source's keys before all of it is read; raises CorpusError."""
        for source, pieces in zip(self.config.sources, self.pieces, strict=True):
            source.check([piece for _, _, piece in pieces])

    @property
    def shared(self) -> Store:
        """Return the place that all machines must reach."""
        return self.store or Store(str(self.work.resolve()))

    def units(self, stage: str) -> list[Unit]:
        """Return the stage's units; CorpusError while an earlier stage is not complete."""
        if stage not in self._units:
            units = self._units[stage] = []
            for number, (task, keys, upstream, pieces) in enumerate(STAGES[stage].plan(self)):
                read = [(source, name, p.start, p.end, p.size) for source, name, p in pieces]
                identity = canonical_sha256([stage, keys, read, upstream])
                code, folder = code_of(stage), self.work / stage / f"{number:06d}"
                units.append(Unit(stage, number, task, identity, code, upstream, folder, pieces))
            if self.store is not None:
                self._stored |= {(stage, n): r for n, r in self.store.records(units).items()}
        return self._units[stage]

    def _record(self, unit: Unit, any_code: bool = False) -> UnitRecord | None:
        if self.store is None:
            return unit.record(any_code)
        return unit.valid(self._stored.get((unit.stage, unit.number), b""), any_code)

    def needs(self, units: Sequence[Unit]) -> tuple[list[Needed], list[list[Needed]]]:
        """Return the files of earlier stages that all units of a stage read, and each one's own.

        CorpusError while an earlier stage is not complete.
        """
        if not any(unit.upstream for unit in units):  # such as a vocabulary that is named
            return [], [[] for _ in units]
        stage, shared, by_file = STAGES[units[0].stage], list[Needed](), dict[Path, Needed]()
        own = [[*dict.fromkeys(stage.files_read(unit.task))] for unit in units]
        listed = {file.parent.parent for files in own for file in files}  # others are read whole
        for earlier, patterns in stage.reads.items():
            for each, record in zip(self.units(earlier), self.records(earlier), strict=True):
                found = needed_of(each, record, patterns)
                if each.folder.parent in listed:
                    by_file |= {each.folder / needed.record.file: needed for needed in found}
                else:
                    shared += found
        return shared, [[by_file[file] for file in files] for files in own]

    def bring(self, stage: str, patterns: Sequence[str], number: int | None = None) -> None:
        """Copy files of a stage's units (or of one) from the store; without one they are here."""
        if self.store is None:
            return
        for unit, record in zip(self.units(stage), self.records(stage), strict=True):
            if number in (None, unit.number):
                for needed in needed_of(unit, record, patterns):
                    self.store.fetch(needed, unit.folder / needed.record.file)

    def finished(self, stage: str, records: Sequence[UnitRecord]) -> None:
        """Take the records of a stage that was just run, instead of reading them.

        A shared file system may not show yet what another machine has written.
        """
        self._records[stage] = list(records)

    def records(self, stage: str) -> list[UnitRecord]:
        """Return what the stage's units wrote; CorpusError if one is missing."""
        if stage not in self._records:
            found = [self._record(unit) for unit in self.units(stage)]
            missing = sum(record is None for record in found)
            if missing and (others := self.of_other_code(stage)):
                raise CorpusError(
                    f"{self.config.output}: {len(others)} of {len(found)} units of stage {stage} "
                    f"were made by different code ({others[min(others)]}): use that code, or "
                    f"run `distil prepare CONFIG --stage {stage}` again with this"
                )
            if missing:
                raise CorpusError(
                    f"{self.config.output}: {missing} of {len(found)} units of stage {stage} are "
                    f"missing: run `distil prepare CONFIG --stage {stage}` for all its tasks first"
                )
            self._records[stage] = [record for record in found if record is not None]
        return self._records[stage]

    def of_other_code(self, stage: str) -> dict[int, str]:
        """Return the numbers of the units that different code left on disk, and how it differs."""
        found = dict[int, str]()
        for unit in self.units(stage):
            if self.store is None:
                found[unit.number] = unit.other_code()
            elif record := self._record(unit, any_code=True):
                found[unit.number] = record.code.differences(unit.code)
        return {number: difference for number, difference in found.items() if difference}

    def folders(self, stage: str) -> tuple[Path, ...]:
        """Return where the stage's units wrote."""
        return tuple(unit.folder for unit in self.units(stage))

    def digest(self, stage: str) -> str:
        """Return what a unit depends on that reads all of a stage's outputs."""
        digests = [record.digest for record in self.records(stage)]
        return f"stage {stage}: {canonical_sha256(digests)}"

    @cached_property
    def tokenizer(self) -> TokenizerRecord | None:
        """Return the tokenizer that was named, None if one is trained; or raise CorpusError."""
        named = self.config.tokenizer
        return None if isinstance(named, TrainTokenizer) else load(named).record()


def needed_of(unit: Unit, record: UnitRecord, patterns: Sequence[str]) -> list[Needed]:
    """Return the files of a unit that fit a pattern."""
    place, name = f"{unit.stage}/{unit.folder.name}", f"{unit.stage}/{name_of(unit)}"
    return [
        Needed(place, name, output)
        for output in record.outputs
        if any(fnmatch(output.file, pattern) for pattern in patterns)
    ]
