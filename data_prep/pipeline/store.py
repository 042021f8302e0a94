"""Make units on machines that share no folder, through a place that fsspec reads and writes.

The place holds STAGE/IDENTITY/FILE for each file of a unit and, written last, STAGE/IDENTITY.json,
its record. A task copies what its unit reads to a scratch folder of its own machine, compares the
hashes, makes the unit there as anywhere, and sends what it wrote.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from data_prep import CorpusError
from data_prep.disk import hash_file
from data_prep.disk.json_files import canonical_sha256
from data_prep.messages import one_line
from data_prep.pipeline.units import Unit, UnitRecord, inputs_are_same, run_unit
from data_prep.shards.manifest import FileRecord
from data_prep.sources.remote import reached
from data_prep.sources.sending import FILES_AT_ONCE, files_below, send

_SCRATCH = "scratch-"  # begins the name of a folder of one task


@dataclass(frozen=True, slots=True)
class Needed:
    """Hold a file of an earlier stage that a unit reads."""

    place: str  # STAGE/NUMBER, as in the folder of all units
    name: str  # STAGE/IDENTITY, as in the store
    record: FileRecord


@dataclass(frozen=True, slots=True)
class Store:
    """Hold a URL, or a path that several machines see."""

    url: str

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the bytes of each file below a folder, by its name from the store on."""
        with reached(f"{self.url}/{folder}") as (files, root):
            found = files_below(files, root.rstrip("/"))
            return {f"{folder}/{name}": info.get("size") or 0 for name, info in found.items()}

    def read(self, names: Sequence[str]) -> dict[str, bytes]:
        """Return the bytes of small files by their names; drivers read several at a time."""
        with reached(self.url) as (files, root):
            root = root.rstrip("/")
            found = files.cat([f"{root}/{name}" for name in names]) if names else {}
            return {path[len(root) + 1 :]: data for path, data in found.items()}

    def fetch(self, needed: Needed, target: Path) -> None:
        """Copy a file to `target`; CorpusError if it is missing or not what its unit has written.

        Drivers try again by themselves where a store is busy.
        """
        name = f"{needed.name}/{needed.record.file}"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)  # other names of a damaged file stay as they are
        with reached(f"{self.url}/{name}") as (files, path):
            files.get_file(path, str(target))
        if hash_file(target) != (needed.record.sha256, needed.record.bytes):
            target.unlink()
            raise CorpusError(
                f"{one_line(self.url)}: {name} is not what its unit has written: remove it and run "
                "the same command again"
            )

    def send(self, folder: Path, unit: Unit, record: UnitRecord) -> None:
        """Copy a unit's files, and its record when they are there; `folder` is the stage's.

        The names in `folder` are the store's.
        """
        name = name_of(unit)
        with reached(f"{self.url}/{unit.stage}", "cannot be written") as (files, root):
            root, protocol = root.rstrip("/"), self.url.partition("://")[0]
            names = [f"{name}/{output.file}" for output in record.outputs]
            for start in range(0, len(names), FILES_AT_ONCE):
                send(files, protocol, folder, root, names[start : start + FILES_AT_ONCE])
            there = files_below(files, f"{root}/{name}")
            for output in record.outputs:
                if there.get(output.file, {}).get("size") != output.bytes:
                    raise CorpusError(
                        f"{one_line(self.url)}: {unit.stage}/{name}/{output.file} did not arrive: "
                        "run the same command again"
                    )
            send(files, protocol, folder, root, [f"{name}.json"])

    def remove(self, units: Iterable[Unit]) -> None:
        """Remove what units have left, records first: without one a unit is not finished."""
        names = {f"{unit.stage}/{name_of(unit)}" for unit in units}
        stages = sorted({name.partition("/")[0] for name in names})
        there = [name for stage in stages for name in self.sizes(stage)]
        records = [name for name in there if name.removesuffix(".json") in names]
        others = [name for name in there if "/".join(name.split("/")[:2]) in names]
        with reached(self.url, "cannot be emptied") as (files, root):
            for found in (records, others):
                if found:
                    files.rm([f"{root.rstrip('/')}/{name}" for name in found])


def name_of(unit: Unit) -> str:
    """Return the name of a unit in a store."""
    return unit.identity[:32]


def bring_records(store: Store, units: Sequence[Unit]) -> None:
    """Write what a store has of units' records to where the units are planned, and nothing else."""
    if not units:
        return
    there = store.sizes(units[0].stage)
    names = [f"{unit.stage}/{name_of(unit)}.json" for unit in units]
    found = store.read([name for name in names if name in there])
    for unit, name in zip(units, names, strict=True):
        file = unit.folder.with_suffix(".json")
        if name in found:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(found[name])
        else:
            file.unlink(missing_ok=True)


def record_of(unit: Unit, data: bytes) -> UnitRecord | None:
    """Return a record that a store has of this very unit; None for any other."""
    try:
        record = UnitRecord.model_validate_json(data)
    except ValidationError:
        return None
    return record if record.identity == unit.identity and record.code == unit.code else None


@dataclass(frozen=True, slots=True)
class StoredStage:
    """Run units of a stage whose files are in a store: a function of (unit, what it alone needs).

    `shared` is what all units of the stage read: each machine fetches it once.
    """

    run: Callable[[Any, Path], dict[str, Any]]
    store: Store
    work: Path  # where tasks say that the files of all stages are
    shared: tuple[Needed, ...]

    def __call__(self, item: tuple[Unit, tuple[Needed, ...]]) -> UnitRecord:
        """Make a unit, unless it is finished; return its record."""
        unit, own = item
        if old := self._finished(unit):
            return old
        with _scratch(self.store.url, unit.stage) as (scratch, common):
            for needed in own:
                self.store.fetch(needed, scratch / needed.place / needed.record.file)
            for needed in self.shared:
                self._link(needed, common, scratch)
            stage = scratch / unit.stage
            here = replace(
                unit,
                task=moved(unit.task, self.work, scratch),
                folder=stage / name_of(unit),
            )
            record = run_unit(self.run, here)
            self.store.send(stage, unit, record)
        return record

    def _finished(self, unit: Unit) -> UnitRecord | None:
        """Return the record of a unit whose inputs are the same and whose files are all there.

        Who reads the files compares their hashes.
        """
        name = f"{unit.stage}/{name_of(unit)}"
        with reached(f"{self.store.url}/{name}.json") as (files, path):
            try:
                data = files.cat_file(path)
            except FileNotFoundError:
                return None
        record = record_of(unit, data)
        if record is None or not inputs_are_same(unit, record):
            return None
        sizes = self.store.sizes(name)
        whole = all(sizes.get(f"{name}/{each.file}") == each.bytes for each in record.outputs)
        return record if whole else None

    def _link(self, needed: Needed, common: Path, scratch: Path) -> None:
        """Give a task the machine's copy of a file; fetch it if there is none, or a damaged one."""
        copy, target = common / needed.record.sha256, scratch / needed.place / needed.record.file
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(copy, target)
            if hash_file(target) == (needed.record.sha256, needed.record.bytes):
                return
        except FileNotFoundError:
            pass
        self.store.fetch(needed, target)
        # Under a name that no other task takes, and then in one step.
        os.link(target, fresh := common / f"{scratch.name}-{copy.name}")
        os.replace(fresh, copy)


@contextmanager
def _scratch(url: str, stage: str) -> Iterator[tuple[Path, Path]]:
    """Yield an empty folder of a task, and the folder of what all tasks of the stage read here.

    What killed tasks have left is removed, and what the tasks of other stages have read.
    """
    home = Path(tempfile.gettempdir()) / f"distil-work-{os.getuid()}"
    home.mkdir(mode=0o700, exist_ok=True)
    if home.stat().st_uid != os.getuid():
        raise CorpusError(f"{home}: is another user's: set TMPDIR to a folder of yours")
    home /= canonical_sha256([url])[:16]
    common = home / stage
    with ExitStack() as stack:
        with _locked(home, wait=True):
            for left in home.iterdir():
                if left.name.startswith(_SCRATCH):
                    with suppress(BlockingIOError), _locked(left):  # its task lives
                        shutil.rmtree(left, ignore_errors=True)
                elif left != common:
                    shutil.rmtree(left, ignore_errors=True)
            common.mkdir(exist_ok=True)
            scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=home))
            stack.enter_context(_locked(scratch))
        try:
            yield scratch, common
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _locked(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Lock a folder of this machine; it is made if it is not there. A dead process holds none."""
    folder.mkdir(exist_ok=True)
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(opened)


def moved(value: Any, old: Path, new: Path) -> Any:
    """Return a task with its paths below `old` moved to `new`."""
    if isinstance(value, Path):
        return new / value.relative_to(old) if value.is_relative_to(old) else value
    if isinstance(value, tuple):
        return tuple(moved(each, old, new) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        changes = {f.name: moved(getattr(value, f.name), old, new) for f in fields(value)}
        return replace(value, **changes)
    return value
