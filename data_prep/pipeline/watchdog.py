"""End a worker whose document takes too long; limits should have refused that document."""

from __future__ import annotations

import faulthandler
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

SECONDS = 600.0
FILE = "watchdog.txt"
STDERR = 2


class Watchdog:
    """End the process with a traceback when `passed` is not called for `seconds`.

    A C thread of faulthandler watches: a parser or a regular expression that holds the interpreter
    cannot stop it. `folder`/watchdog.txt names the last document until the work is done, to
    explain why a worker died. Results do not depend on it.
    """

    def __init__(self, folder: Path, seconds: float = SECONDS) -> None:
        self._file = folder / FILE
        self._seconds = seconds
        self._armed = 0.0

    def __enter__(self) -> Watchdog:
        self._arm("the start")
        return self

    def passed(self, document: str) -> None:
        """Note that a document is done; arm at most once a second, since that starts a thread."""
        if time.monotonic() - self._armed > min(1.0, self._seconds / 4):
            self._arm(document)

    def _arm(self, document: str) -> None:
        self._armed = time.monotonic()
        self._file.write_text(document, encoding="utf-8", errors="replace")
        # Not sys.stderr, which may be no file.
        faulthandler.dump_traceback_later(self._seconds, exit=True, file=STDERR)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._file.unlink(missing_ok=True)


def last_seen(home: Path, since: float = 0) -> list[str]:
    """Return the last document of each worker that died in a stage's folder after `since`
    (time.time)."""
    documents = []
    for file in sorted(home.glob(f".*/{FILE}")):
        with suppress(FileNotFoundError):  # of a worker that has finished meanwhile
            if file.stat().st_mtime >= since - 2:
                documents.append(file.read_text(encoding="utf-8"))
    return documents
