"""Make units on machines that share no folder, through a place that fsspec reads and writes.

The place holds CORPUS/STAGE/IDENTITY/FILE for each file of a unit and, written last,
CORPUS/STAGE/IDENTITY.json, its record; CORPUS is a hash of the config, so one place may serve
several. CORPUS/runs/NAME.json says which process prepares it. A task copies what its unit reads to
a scratch folder on its machine, compares the hashes, makes the unit there as anywhere, and sends
what it wrote.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from data_prep import CorpusError
from data_prep.disk import hash_file, linked, write_file
from data_prep.disk.json_files import canonical_sha256
from data_prep.disk.locks import Identity, is_alive, parse_identity, this_process
from data_prep.disk.made import held, remove_left
from data_prep.messages import one_line
from data_prep.pipeline.units import Unit, UnitRecord, inputs_are_same, run_unit
from data_prep.shards.manifest import FileRecord
from data_prep.sources.remote import FILES_AT_ONCE, again, files_below, reached, send

_SCRATCH = "scratch-"  # begins the name of a folder of one task


@dataclass(frozen=True, slots=True)
class Needed:
    """Hold a file of an earlier stage that a unit reads."""

    place: str  # STAGE/NUMBER, as in the folder of all units
    name: str  # STAGE/IDENTITY, as in the store
    record: FileRecord


@dataclass(frozen=True, slots=True)
class Store:
    """Hold the URL, or a path that several machines see, of one corpus."""

    url: str

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the bytes of each file below a folder, by its name from the store on."""
        with reached(f"{self.url}/{folder}") as (files, root):
            found = again(lambda: files_below(files, root.rstrip("/")))
            return {f"{folder}/{name}": info.get("size") or 0 for name, info in found.items()}

    def read(self, name: str) -> bytes | None:
        """Return the bytes of a small file; None if it is missing."""
        with reached(f"{self.url}/{name}") as (files, path):
            try:
                found: bytes = again(lambda: files.cat_file(path))
            except FileNotFoundError:
                return None
            return found

    def records(self, units: Sequence[Unit]) -> dict[int, bytes]:
        """Return the records of a stage's units that the store holds, by their number."""
        there = self.sizes(units[0].stage) if units else {}
        names = {unit.number: f"{unit.stage}/{name_of(unit)}.json" for unit in units}
        wanted = {number: name for number, name in names.items() if name in there}
        with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
            found = zip(wanted, pool.map(self.read, wanted.values()), strict=True)
            return {number: data for number, data in found if data is not None}

    def fetch(self, needed: Needed, target: Path) -> None:
        """Copy a file to `target`.

        Raises:
            CorpusError: it is missing, or not what its unit has written. The unit's record is
                removed, so that it is made again.
        """
        name, record = f"{needed.name}/{needed.record.file}", f"{needed.name}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)  # hard links to the damaged file are kept
        with reached(f"{self.url}/{name}") as (files, path), suppress(FileNotFoundError):
            again(lambda: files.get_file(path, str(target)))
        if target.exists() and hash_file(target) == (needed.record.sha256, needed.record.bytes):
            return
        target.unlink(missing_ok=True)
        self.delete(record)
        stage = needed.name.partition("/")[0]
        raise CorpusError(
            f"{one_line(self.url)}/{name}: missing, or not what its unit has written: run `distil "
            f"prepare CONFIG --stage {stage}`, or all of `distil prepare CONFIG`, again"
        )

    def send(self, folder: Path, unit: Unit, record: UnitRecord) -> None:
        """Copy a unit's files to the store and, once all have arrived, its record.

        `folder` is the stage's; files keep their names in the store.
        """
        name = name_of(unit)
        with reached(f"{self.url}/{unit.stage}", "cannot be written") as (files, root):
            root = root.rstrip("/")
            names = [f"{name}/{output.file}" for output in record.outputs]
            for start in range(0, len(names), FILES_AT_ONCE):
                self._put(files, folder, root, names[start : start + FILES_AT_ONCE])
            there = files_below(files, f"{root}/{name}")
            for output in record.outputs:
                if there.get(output.file, {}).get("size") != output.bytes:
                    raise CorpusError(
                        f"{one_line(self.url)}/{unit.stage}/{name}/{output.file}: did not arrive: "
                        "run the same command again"
                    )
            self._put(files, folder, root, [f"{name}.json"])

    def write(self, name: str, data: bytes) -> None:
        """Write a small file."""
        with reached(f"{self.url}/{name}", "cannot be written") as (files, path):
            if "://" in self.url:
                again(lambda: files.pipe_file(path, data))
            else:  # whole, or the one before: this process may end at any moment
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                write_file(Path(path), lambda file: file.write(data))

    def delete(self, name: str) -> None:
        """Remove a file; a missing one is no error."""
        with (
            reached(f"{self.url}/{name}", "cannot be removed") as (files, path),
            suppress(FileNotFoundError),
        ):
            files.rm_file(path)

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Tell others that this process prepares the corpus."""
        name = f"runs/{uuid.uuid4().hex[:8]}.json"
        self.write(name, json.dumps(asdict(this_process())).encode())
        try:
            yield
        finally:
            with suppress(CorpusError):
                self.delete(name)

    def leave(self) -> list[Identity]:
        """Return the other processes that prepare the corpus, and no longer be one.

        A dead one of another machine counts.
        """
        here, found = this_process(), []
        for name in self.sizes("runs"):
            other = parse_identity(self.read(name))
            near = other is not None and other.machine == here.machine
            if other == here or (near and other is not None and not is_alive(other)):
                self.delete(name)
            elif other is not None:
                found.append(other)
        return found

    def _put(self, files: Any, folder: Path, root: str, names: Sequence[str]) -> None:
        if "://" in self.url:
            send(files, self.url.partition("://")[0], folder, root, names)
            return
        for name in names:  # whole or not at all: another task may read it
            target = Path(root, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            part = target.with_name(f".{target.name}-{uuid.uuid4().hex[:8]}")
            shutil.copyfile(folder / name, part)
            os.replace(part, target)

    def remove(self) -> None:
        """Remove all files of this corpus."""
        with reached(self.url, "cannot be emptied") as (files, root):
            files.invalidate_cache()
            if files.exists(root):
                files.rm(root, recursive=True)


def name_of(unit: Unit) -> str:
    """Return the name of a unit in a store."""
    return unit.identity[:32]


@dataclass(frozen=True, slots=True)
class StoredStage:
    """Run units of a stage whose files are in a store: a function of (unit, what only it needs).

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
            if old := self._finished(unit):  # Ray may have begun the same task elsewhere
                return old
            self.store.send(stage, unit, record)
        return record

    def _finished(self, unit: Unit) -> UnitRecord | None:
        """Return the record of a unit whose inputs are the same and whose files are all there.

        Who reads the files compares their hashes.
        """
        name = f"{unit.stage}/{name_of(unit)}"
        data = self.store.read(f"{name}.json")
        record = unit.valid(data) if data is not None else None
        if record is None or not inputs_are_same(unit, record):
            return None
        sizes = self.store.sizes(name)
        whole = all(sizes.get(f"{name}/{each.file}") == each.bytes for each in record.outputs)
        return record if whole else None

    def _link(self, needed: Needed, common: Path, scratch: Path) -> None:
        """Give a task the machine's copy of a file; fetch it if there is none, or a damaged one."""
        copy, target = common / needed.record.sha256, scratch / needed.place / needed.record.file
        target.parent.mkdir(parents=True, exist_ok=True)
        with held(common / f"{copy.name}.lock", wait=True):
            if copy.exists() and hash_file(copy) == (needed.record.sha256, needed.record.bytes):
                linked(copy, target)
                return
            self.store.fetch(needed, target)
            fresh = common / f"{copy.name}.part"
            fresh.unlink(missing_ok=True)
            linked(target, fresh)
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
        with held(home, wait=True):
            for left in home.iterdir():
                if left != common:
                    # A task that uses it lives, or has just ended.
                    remove_left(left)
            common.mkdir(exist_ok=True)
            stack.enter_context(held(common, shared=True))
            scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=home))
            stack.enter_context(held(scratch))
        try:
            yield scratch, common
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


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
