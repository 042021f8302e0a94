"""Share what the tests of `prepare` need."""

import json
from pathlib import Path
from typing import Any

from data_prep.config import CorpusConfig

# Bytes: several parts, units and shards from a few kB.
SMALL: dict[str, Any] = {"part_bytes": 2_000, "piece_bytes": 500}


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file of a folder by its path in it."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def unit_times(config: CorpusConfig) -> dict[str, int]:
    """Return when the record of each unit was written, by stage and number."""
    records = sorted((config.output / ".work").glob("*/*.json"))
    return {f"{record.parent.name}/{record.stem}": record.stat().st_mtime_ns for record in records}


def flip_bit(path: Path, place: int | None = None, bit: int = 1) -> None:
    """Flip a bit of a file, by default in its middle; its size stays."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if place is None else place] ^= bit
    path.write_bytes(data)


def lines_source(path: Path, lines: list[str], **keys: Any) -> dict[str, Any]:
    """Write a file of lines; return the source in which each line is a document."""
    path.write_text("\n".join(lines), encoding="utf-8")
    return {"kind": "text", "path": str(path), "document": "line", **keys}


def records_source(path: Path, texts: list[str], **keys: Any) -> dict[str, Any]:
    """Write a file of JSON lines; return the source in which each text is a document."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return {"kind": "jsonl", "path": str(path), **keys}
