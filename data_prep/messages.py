"""Print and escape messages for all packages."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path

from data_prep.disk.credentials import masked

_LONGEST_LINE = 300  # characters

Progress = Callable[[str, int, int, str], None]  # (stage, done, total, both in words)


def extra(name: str) -> str:
    """Say how to install an extra: from this project's folder, since anyone may own its name on an
    index of packages."""
    folder = Path(__file__).resolve().parents[1]
    place = str(folder) if (folder / "setup.py").is_file() else "the project's folder"
    return f"install the extra {name}: pip install '.[{name}]' in {place}"


def first_line(error: Exception) -> str:
    """Return what a library's error message says, in one line."""
    lines = str(error).strip().splitlines()
    # A validator names the key in its first line, and the fault in the second.
    lines = lines[: 2 if lines and lines[0].endswith(":") else 1]
    if not lines or isinstance(error, LookupError | ArithmeticError):  # their message may be "'x'"
        lines.insert(0, type(error).__name__)
    return ": ".join(line.strip(" :") for line in lines)[:_LONGEST_LINE]


def printable(text: str) -> str:
    """Escape control and invisible characters; every untrusted string is printed through it.

    Passwords and signatures in URLs are left out. Line ends stay and blanks become spaces; control,
    format (U+202E turns the line round) and unassigned characters are written as Python escapes.
    `one_line` is for another's string within a line.
    """
    text = masked(text)
    if text.isprintable():
        return text
    shown = []
    for character in text:
        if character.isprintable() or character == "\n":
            shown.append(character)
        elif character in "\t\r" or unicodedata.category(character) == "Zs":
            shown.append(" ")
        else:
            shown.append(character.encode("unicode_escape").decode("ascii"))
    return "".join(shown)


def one_line(text: str, limit: int | None = None) -> str:
    """Return a printable text on one line, of at most `limit` characters."""
    text = " ".join(printable(text).split())
    return text if limit is None or len(text) <= limit else f"{text[: limit - 3]}..."


def error_line(error: BaseException, limit: int = 200) -> str:
    """Return what an error says on one line, or its type if it says nothing."""
    return one_line(str(error), limit) or type(error).__name__


def duration(seconds: float) -> str:
    """Return a span of time in seconds, minutes, hours or days."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 72 * 3600 else f"{seconds / 86400:.1f} days"


def megabytes(num: int) -> str:
    """Return bytes in units of 10^6, with one decimal below ten."""
    return f"{num / 1e6:,.{0 if num >= 10**7 else 1}f}"


def complain(text: str) -> None:
    """Print lines to standard error; others' strings in them are spelled out."""
    print(printable(text), file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """Print a line that begins with "warning:" to standard error."""
    complain(f"warning: {text}")
