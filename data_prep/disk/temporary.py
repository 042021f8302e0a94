"""Lock folders of this machine for as long as a process lives, and remove what dead ones left."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
