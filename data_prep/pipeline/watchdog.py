"""End a worker whose document takes too long; limits should have refused that document."""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SECONDS = 600.0
FILE = "watchdog.txt"
STDERR = 2


@contextmanager
def watchdog(folder: Path, seconds: float = SECONDS) -> Iterator[Callable[[str], None]]:
    """End the process with a traceback when the yielded function is not called for `seconds`.

    A C thread of faulthandler watches: a parser or a regular expression that holds the interpreter
    cannot stop it. `folder`/watchdog.txt names the last document until the work is done, to
    explain why a worker died. Results do not depend on it.
    """
    file = folder / FILE
    armed = -seconds
    pause = min(1.0, seconds / 4)  # between two calls that arm: each starts a thread

    def passed(document: str) -> None:
        """Note that a document is done."""
        nonlocal armed
        if time.monotonic() - armed > pause:
            armed = time.monotonic()
            file.write_text(document, encoding="utf-8", errors="replace")
            # Not sys.stderr, which may be no file.
            faulthandler.dump_traceback_later(seconds, exit=True, file=STDERR)

    passed("the start")
    try:
        yield passed
    finally:
        faulthandler.cancel_dump_traceback_later()
        file.unlink(missing_ok=True)


def last_seen(home: Path, since: float = 0) -> list[str]:
    """Return the last document of each worker that died in a stage's folder after `since`
    (time.time)."""
    documents = []
    for file in sorted(home.glob(f".*/{FILE}")):
        with suppress(FileNotFoundError):  # of a worker that has finished meanwhile
            if file.stat().st_mtime >= since - 2:
                documents.append(file.read_text(encoding="utf-8"))
    return documents
