"""Note the document that a worker is about to read, and end a worker whose document takes too long.

Limits should have refused such a document; results do not depend on this.
"""

from __future__ import annotations

import faulthandler
import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SECONDS = 600.0
FILE = "watchdog.txt"
STDERR = 2
START = "the start"  # before the first document
_SIZE = 4096  # bytes of the file


@contextmanager
def watchdog(folder: Path, seconds: float = SECONDS) -> Iterator[Callable[[str], None]]:
    """End the process with a traceback when the yielded function is not called for `seconds`.

    It is called with each document before work on it begins. `folder`/watchdog.txt names that
    document until the work is done, to explain why a worker died: memory that is shared with the
    file outlives the process. A C thread of faulthandler watches: a parser or a regular expression
    that holds the interpreter cannot stop it.
    """
    file = folder / FILE
    file.write_bytes(bytes(_SIZE))  # on a full disk this fails, and not a write to the memory
    armed = -seconds
    pause = min(1.0, seconds / 4)  # between two calls that arm: each starts a thread
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), _SIZE) as noted:

        def starts(document: str) -> None:
            """Note that work on a document begins."""
            nonlocal armed
            name = document.encode("utf-8", "replace")[: _SIZE - 1]
            noted[: len(name) + 1] = name + b"\0"
            if time.monotonic() - armed > pause:
                armed = time.monotonic()
                # Not sys.stderr, which may be no file.
                faulthandler.dump_traceback_later(seconds, exit=True, file=STDERR)

        starts(START)
        try:
            yield starts
        finally:
            faulthandler.cancel_dump_traceback_later()
            file.unlink(missing_ok=True)


def last_seen(home: Path, unit: str = "", since: float = 0) -> list[str]:
    """Return the documents that workers read when they died after `since` (time.time).

    `home` is a stage's folder, and `unit` the name of one of its units; without it, of all.
    """
    documents = []
    for file in sorted(home.glob(f".{unit}-*/{FILE}" if unit else f".*/{FILE}")):
        with suppress(FileNotFoundError):  # its worker has finished meanwhile
            if file.parent.stat().st_ctime >= since - 2:
                documents.append(file.read_bytes().split(b"\0")[0].decode(errors="replace"))
    return documents
