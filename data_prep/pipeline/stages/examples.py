"""Collect the n-grams of the evaluation files, which no training document should hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep import CorpusError
from data_prep.config import CorpusConfig
from data_prep.duplicates import decontamination
from data_prep.pipeline.units import Planned, Stage
from data_prep.sources import Piece

if TYPE_CHECKING:
    from data_prep.pipeline.plan import Plan
    from data_prep.pipeline.units import NamedPiece

FILE = "ngrams.safetensors"


def evaluation_files(config: CorpusConfig) -> list[NamedPiece]:
    """Return the evaluation files, each whole; CorpusError if one cannot be read."""
    files = () if config.decontaminate is None else config.decontaminate.files
    found: list[NamedPiece] = []
    for number, file in enumerate(files):
        try:
            size = file.stat().st_size
        except OSError as error:
            raise CorpusError(
                f"decontaminate.files: {file}: cannot be read: {error.strerror}"
            ) from None
        found.append((number, file.name, Piece(str(file), 0, None, size)))
    return found


def _plan(plan: Plan) -> Iterator[Planned]:
    """Yield one unit for all files, none without `decontaminate`."""
    if plan.config.decontaminate is not None:
        files = plan.config.decontaminate.files
        yield Planned(files, {}, pieces=tuple(evaluation_files(plan.config)))


def examples(files: tuple[Path, ...], folder: Path) -> dict[str, Any]:
    """Write the n-grams of all files."""
    contamination = decontamination.build(files)
    decontamination.save(contamination, folder / FILE)
    return {
        "ngrams": sum(len(index.hashes) for index in contamination.by_length.values()),
        "sizes": dict(zip(contamination.names, contamination.sizes, strict=True)),
        "files": dict(zip(contamination.names, contamination.num_texts, strict=True)),
        "too_short": dict(zip(contamination.names, contamination.num_short, strict=True)),
    }


STAGE = Stage("examples", _plan, examples, reads={})
