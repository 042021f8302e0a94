"""Run the units of a stage: skip what is done, redo what depends on anything that has changed.

A unit's outputs are a folder, and its record says what made them. The record is written last and
names each output's hash, so that a killed, deleted or altered unit is noticed. It names the code,
too: the process that plans a unit and the worker that makes it must have the same.
"""

from __future__ import annotations

import os
import shutil
import socket
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from data_prep import CorpusError
from data_prep.disk import sync, write_file
from data_prep.disk.json_files import canonical_sha256, read_regular, self_sha256
from data_prep.pipeline.code import Code, code_of
from data_prep.shards.manifest import FileRecord
from data_prep.shards.writing import file_record
from data_prep.sources import Piece
from data_prep.sources.remote import is_remote, looked_up_once

if TYPE_CHECKING:
    from data_prep.pipeline.plan import Plan


# Not at run time: the source of a stage would then count as changed with that of the plan.

Reads = Mapping[str, tuple[str, ...]]  # earlier stage -> patterns of its outputs


class Planned(NamedTuple):
    """Hold what one unit is to do; `keys` are all the settings that shape its outputs.

    `upstream` are the digests of what it reads of earlier stages, `pieces` the inputs it reads.
    """

    task: Any
    keys: dict[str, Any]
    upstream: tuple[str, ...] = ()
    pieces: tuple[NamedPiece, ...] = ()


@dataclass(frozen=True, slots=True)
class Stage:
    """Hold one stage of the pipeline.

    Args:
        name: of the stage, of its folder, and for `--stage`.
        plan: yields the units in order, once all earlier stages are complete.
        run: takes a task and an empty folder, fills it, and returns the result for later stages.
        reads: patterns of the files that its units read, by earlier stage.
        files_read: returns the files of an earlier stage that a task reads; none means all.
        leaves_rows: returns, from the stage's records, whether a training row can still come.
        warnings: returns the warnings that a unit's result calls for.
        result_is_provenance: False keeps a large result out of provenance.jsonl.
    """

    name: str
    plan: Callable[[Plan], Iterator[Planned]]
    run: Callable[[Any, Path], dict[str, Any]]
    reads: Reads
    files_read: Callable[[Any], Iterable[Path]] = lambda task: ()
    leaves_rows: Callable[[Sequence[UnitRecord]], bool] = lambda records: True
    warnings: Callable[[dict[str, Any]], Iterable[str]] = lambda result: ()
    result_is_provenance: bool = True


def group(sizes: Sequence[int], limit: int) -> list[range]:
    """Join consecutive items into groups of at most `limit`; a larger item is its own group."""
    groups: list[range] = []
    start, total = 0, 0
    for item, size in enumerate(sizes):
        if item > start and total + size > limit:
            groups.append(range(start, item))
            start, total = item, 0
        total += size
    if len(sizes) > start:
        groups.append(range(start, len(sizes)))
    return groups


Task = TypeVar("Task")


class InputRecord(BaseModel):
    """Hold a piece that a unit read; `version` is quick to compare, `sha256` is certain."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    source: int
    input: str
    start: int
    end: int | None
    bytes: int
    version: str  # size and time, an ETag or a commit; empty where a store has none
    sha256: str | None  # None of a remote input with a version


class UnitRecord(BaseModel):
    """Hold what a finished unit read and wrote; later stages read its `result`."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    stage: str
    unit: int
    identity: str
    code: Code
    upstream: tuple[str, ...]
    inputs: tuple[InputRecord, ...]
    outputs: tuple[FileRecord, ...]
    result: dict[str, Any]  # counts, and what the next stages would otherwise read again
    self_sha256: str

    @property
    def digest(self) -> str:
        """Return the hash of the outputs, on which later units depend, however they were made."""
        return canonical_sha256([(output.file, output.sha256) for output in self.outputs])


NamedPiece = tuple[int, str, Piece]  # (source number, name in records, piece)


@dataclass(frozen=True, slots=True)
class Unit:
    """Hold one unit of a stage; its function takes `task` and writes into `folder`.

    Its record is `folder`.json. `identity` is the hash of all that decides the outputs, but `code`
    and the content of the `pieces`; `upstream` are the digests of what it reads of earlier stages.
    """

    stage: str
    number: int
    task: Any
    identity: str
    code: Code
    upstream: tuple[str, ...]
    folder: Path  # written under a temporary name next to it, then renamed
    pieces: tuple[NamedPiece, ...]  # pieces of the input; later stages read what earlier ones wrote

    def record(self, any_code: bool = False) -> UnitRecord | None:
        """Return the valid record that this (or any) code left of this very unit, else None."""
        try:
            return self.valid(read_regular(self.folder.with_suffix(".json")), any_code)
        except OSError:
            return None

    def valid(self, data: bytes, any_code: bool = False) -> UnitRecord | None:
        """Return the record in `data` if it is whole, and of this very unit; else None."""
        try:
            record = UnitRecord.model_validate_json(data)
        except ValidationError:
            return None
        whole = record.self_sha256 == self_sha256(record.model_dump(mode="json"))
        ours = record.identity == self.identity and (any_code or record.code == self.code)
        if not (whole and ours):
            return None
        # A store knows it by its identity; a file that was added may have moved its number.
        return record if record.unit == self.number else sealed(record, unit=self.number)

    def other_code(self) -> str:
        """Return how the code differs that wrote this unit; "" if it does not, or none is there."""
        record = self.record(any_code=True)
        return record.code.differences(self.code) if record else ""


def run_unit(function: Callable[[Task, Path], dict[str, Any]], unit: Unit) -> UnitRecord:
    """Run a unit unless it is finished, with `function(task, folder)`; return its record.

    CorpusError if this worker would make it with different code than it was planned with.
    """
    places = "where the command was given", "in the worker"
    if difference := unit.code.differences(code_of(unit.stage), places):
        raise CorpusError(
            f"{socket.gethostname()}: a worker runs different code from the main process "
            f"({difference}): install one version of this project and its libraries everywhere"
        )
    if old := _finished(unit):
        return old
    home, file = unit.folder.parent, unit.folder.with_suffix(".json")
    # Another task may make the same unit at the same time.
    temporary = home / f".{unit.folder.name}-{uuid.uuid4().hex[:8]}"
    temporary.mkdir(parents=True)
    try:
        with looked_up_once():
            read = [read_record(*piece) for piece in unit.pieces]
            result = function(unit.task, temporary)
        with looked_up_once():
            for (_, name, piece), before in zip(unit.pieces, read, strict=True):
                # Without a version, the piece's own bytes have to do.
                if not is_same(piece, before, with_others=not before.version):
                    raise CorpusError(
                        f"{name}: changed while it was read: run the same command again"
                    )
        names = sorted(path.relative_to(temporary).as_posix() for path in temporary.rglob("*.*"))
        for written in names:
            sync(temporary / written)
        outputs = tuple(file_record(temporary, written) for written in names)
        if other := _finished(unit):  # tasks of another division make the same unit
            return other
        remove(file)
        remove(unit.folder)
        os.replace(temporary, unit.folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sync(home)
    record = UnitRecord(
        stage=unit.stage,
        unit=unit.number,
        identity=unit.identity,
        code=unit.code,
        upstream=unit.upstream,
        inputs=tuple(read),
        outputs=outputs,
        result=result,
        self_sha256="",
    )
    record = sealed(record)
    data = record.model_dump_json().encode() + b"\n"
    write_file(file, lambda opened: opened.write(data))
    return record


def sealed(record: UnitRecord, **changes: Any) -> UnitRecord:
    """Return a record with changes, and with its own hash."""
    record = record.model_copy(update=changes)
    own = self_sha256(record.model_dump(mode="json"))
    return record.model_copy(update={"self_sha256": own})


def read_record(source: int, name: str, piece: Piece) -> InputRecord:
    """Describe an input as it is now.

    Where a store tells its version, its bytes are not hashed: large ones would be read twice.
    """
    version = piece.version()
    return InputRecord(
        source=source,
        input=name,
        start=piece.start,
        end=piece.end,
        bytes=piece.size,
        version=version,
        sha256=None if version and is_remote(piece.path) else piece.sha256(),
    )


def inputs_are_same(unit: Unit, record: UnitRecord) -> bool:
    """Return whether the unit's pieces still hold what the record says was read."""
    pieces = [piece for _, _, piece in unit.pieces]
    return len(pieces) == len(record.inputs) and all(
        is_same(piece, read) for piece, read in zip(pieces, record.inputs, strict=True)
    )


def is_same(piece: Piece, read: InputRecord, *, with_others: bool = False) -> bool:
    """Return whether a piece still holds what was read; a copy's time differs, so then by content.

    What is empty says nothing, and is never equal. The last document of a part of a file may end
    in the next part, which the part's hash does not cover: by content it is equal only
    `with_others`, where all parts of the file are compared.
    """
    if (version := piece.version()) and version == read.version:
        return True
    by_content = with_others or not piece.reads_beyond
    return by_content and bool(read.sha256) and piece.sha256() == read.sha256


def is_output_whole(unit: Unit, output: FileRecord) -> bool:
    """Return whether a file that the unit wrote still has the bytes it had."""
    try:
        return file_record(unit.folder, output.file) == output
    except OSError:
        return False


def _finished(unit: Unit) -> UnitRecord | None:
    """Return the unit's record if neither its inputs nor its outputs have changed."""
    record = unit.record()
    with looked_up_once():
        if record is None or not inputs_are_same(unit, record):
            return None
    return record if all(is_output_whole(unit, output) for output in record.outputs) else None


def remove(path: Path) -> None:
    """Remove a file or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
