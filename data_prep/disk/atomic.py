"""Write files atomically: temporary name, flush to disk, rename."""

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO


def write_file(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Let `write` fill a file that appears under its name only when it is safely on disk."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)  # a rename is a change of the folder


def sync(path: Path) -> None:
    """Flush a file, or the renames in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def linked(source: Path, target: Path) -> None:
    """Give a file a second name; copy it where the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def hash_file(path: Path) -> tuple[str, int]:
    """Return the sha256 of a file and its size in bytes."""
    whole, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            whole.update(block)
            size += len(block)
    return whole.hexdigest(), size
