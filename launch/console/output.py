"""Output whose loss does not end a run: its disk is full, its pipe or terminal closed."""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO


class _Output(io.FileIO):
    def write(self, data: bytes, /) -> int:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError:
            return len(data)


def tolerant(number: int, encoding: str) -> TextIO:
    """Return a text stream over file descriptor `number` that drops what cannot be written."""
    return io.TextIOWrapper(
        _Output(number, "w", closefd=False),
        encoding=encoding,
        errors="backslashreplace",
        write_through=True,
    )


def keep_going() -> None:
    """Let this process go on when nobody reads what it prints.

    For commands that work for hours and print only their progress. A command that prints its
    result must fail when that is lost. A stream that Python did not open itself is left as it is.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed when this process started
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    if sys.stdout is sys.__stdout__ and sys.stdout is not None:
        sys.stdout.flush()
        sys.stdout = tolerant(1, sys.stdout.encoding)
    if sys.stderr is sys.__stderr__ and sys.stderr is not None:
        sys.stderr = tolerant(2, sys.stderr.encoding)
