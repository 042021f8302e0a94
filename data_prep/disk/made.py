"""Keep with a folder what it was made of, so that it is made again for anything else.

The record is a JSON file of the folder: `inputs`, the hashes of the folder's `files`, and what its
maker adds. A folder is built next to its final place, under a temporary name that its maker keeps
locked.
"""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from data_prep.disk.atomic import hash_file
from data_prep.disk.json_files import parse_object, write_json
from data_prep.disk.locks import Busy

UNKNOWN = "unknown"  # an input that tells no version; nothing that was made of it is kept
_NEW = 10  # seconds in which a process locks a folder that it has made
CARD = "README.md"  # what people change later, and no record holds


@contextmanager
def held(
    folder: Path, *, wait: bool = False, make: bool = True, shared: bool = False
) -> Iterator[None]:
    """Lock a folder of this machine. A dead process holds none."""
    if make:
        folder.mkdir(exist_ok=True)
    opened = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(opened, kind | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(opened)


def remove_left(folder: Path) -> bool:
    """Remove a folder that no living process holds; return whether one does."""
    try:
        with held(folder, make=False):
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:  # also of a file system without such locks
        return isinstance(error, BlockingIOError)
    return False


def read_record(file: Path) -> dict[str, Any]:
    """Return a folder's record; empty if it is missing, damaged or none of this form."""
    try:
        found = parse_object(file.read_bytes())
    except (OSError, ValueError):
        return {}
    whole = all(isinstance(found.get(key, {}), dict) for key in ("inputs", "files"))
    return found if whole and "inputs" in found else {}


def difference(file: Path, inputs: Mapping[str, Any]) -> str | None:
    """Return why a folder is not what these inputs make; None if it is, and is whole.

    Args:
        file: its record.
        inputs: all that shapes it, as JSON has it: keys, versions or hashes of what is read, a
            number that is raised when the same would make something else.
    """
    known = read_record(file)
    if not known:
        return f"there is no {file} of this version"
    if UNKNOWN in inputs.values():
        return "an input tells no version"
    for key in sorted({*known["inputs"], *inputs}):
        was, now = (values.get(key) for values in (known["inputs"], inputs))
        if (was or None) != (now or None):  # a key that a version lacks is the same as an empty one
            return f"{key} was {was} and is now {now}"[:200]
    try:
        files = known.get("files", {})
        hashes = {name: e if isinstance(e, str) else e["sha256"] for name, e in files.items()}
        if (there := files_of(file)) != hashes:
            names = sorted(there.keys() | hashes)
            return next(f"{n} has changed" for n in names if there.get(n) != hashes.get(n))
    except (OSError, KeyError, TypeError, AttributeError) as error:
        return f"{file}: {error}"
    return None


def files_of(file: Path) -> dict[str, str]:
    """Return the hash of each file beside a record, by its path, but of the card."""
    names = [name for name in _names(file.parent) if name not in (file.name, CARD)]
    return {n: hash_file(p)[0] if (p := file.parent / n).is_file() else "no file" for n in names}


def _names(folder: Path) -> list[str]:
    """Return the paths of all that a folder holds but folders with something in them."""
    found = sorted(folder.rglob("*"))
    filled = {path.parent for path in found}
    return [str(path.relative_to(folder)) for path in found if path not in filled]


def seal(file: Path, inputs: Mapping[str, Any], **more: Any) -> None:
    """Write the record of a folder whose other files are written."""
    write_json(file, {"inputs": dict(inputs), "files": files_of(file), **more})


def foreign(file: Path, others: Collection[str] = ()) -> str | None:
    """Return the first file of a folder that its record does not name, nor `others`; or None."""
    known = read_record(file)
    own = {file.name, *known.get("files", ()), *others} if known else set()
    return next((name for name in _names(file.parent) if name not in own), None)


@contextmanager
def beside(target: Path, *, who: str = "") -> Iterator[Path]:
    """Yield an empty folder beside `target`, for what then gets its name; it is gone at the end.

    What killed processes have left there is removed.

    Args:
        target: a folder, which may exist.
        who: the command, where a second process on the same target is refused.

    Raises:
        Busy: another process makes it.
    """
    target = Path(os.path.realpath(target))
    own = target.with_name(f".tmp-{target.name}-{uuid.uuid4().hex[:8]}")
    new = own.with_name(f"{own.name}.new")
    new.mkdir(parents=True)
    with ExitStack() as stack:
        with suppress(OSError):  # a file system without such locks
            stack.enter_context(held(new, make=False))
        new.rename(own)  # with its lock: what has such a name and none is of a dead process
        stack.callback(shutil.rmtree, own, ignore_errors=True)
        left = f".tmp-{glob.escape(target.name)}-{'[0-9a-f]' * 8}"
        for other in target.parent.glob(left):
            if other != own and remove_left(other) and who:
                raise Busy(f"{target}: another process of {who} makes it: wait for its end")
        for other in target.parent.glob(f"{left}.new"):
            with suppress(OSError):  # another process has renamed it
                if time.time() - other.stat().st_mtime > _NEW:
                    other.rmdir()
        yield own


@contextmanager
def aside(target: Path, *, who: str) -> Iterator[Path]:
    """Yield a new folder that takes the place of `target` if the block ends without an error."""
    target = Path(os.path.realpath(target))
    with beside(target, who=who) as place:
        folder = place / "new"
        folder.mkdir()
        yield folder
        if target.exists():  # whole or absent, whenever a kill comes
            target.rename(place / "old")
        folder.rename(target)
