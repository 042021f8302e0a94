"""Evaluation files -> the 13-grams that no training document should hold."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.duplicates import decontamination

FILE = "ngrams.safetensors"


@dataclass(frozen=True, slots=True)
class ExamplesTask:
    """The files a user named."""

    files: tuple[Path, ...]


def examples(task: ExamplesTask, folder: Path) -> dict[str, Any]:
    """Write the n-grams of all files."""
    contamination = decontamination.build(task.files)
    decontamination.save(contamination, folder / FILE)
    return {
        "ngrams": len(contamination.hashes),
        "files": dict(zip(contamination.names, contamination.num_texts, strict=True)),
        "too_short": dict(zip(contamination.names, contamination.num_short, strict=True)),
    }
