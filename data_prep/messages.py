"""Words for the screen that all packages share."""

from __future__ import annotations

from pathlib import Path


def extra(name: str) -> str:
    """Say how to install an extra: from this project's folder, since anyone may own its name on an
    index of packages."""
    folder = Path(__file__).resolve().parents[1]
    place = str(folder) if (folder / "setup.py").is_file() else "the project's folder"
    return f"install the extra {name}: pip install -e '.[{name}]' in {place}"


def printable(text: str, limit: int = 200) -> str:
    """Return one line without control characters: titles and names are other people's strings."""
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
