"""Load the tokenizer that was named, or train one on the training documents."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data_prep import CorpusError
from data_prep.config import (
    JsonTokenizer,
    TrainByteLevelBPE,
    TrainTokenizer,
    TrainWordPiece,
    VocabularyTokenizer,
)
from data_prep.duplicates.dedup import draw
from data_prep.pipeline.stages.deduplicate import TRAIN, fates_file
from data_prep.pipeline.stages.documents import read_index, read_part
from data_prep.pipeline.units import Planned, Stage
from data_prep.shards.manifest import TokenizerRecord
from data_prep.tokens import load
from data_prep.tokens.training import train_tokenizer

if TYPE_CHECKING:
    from data_prep.pipeline.plan import Plan

# A vocabulary needs no more text than this, and the trainer's memory grows with its words.
TEXT_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class VocabularyTask:
    """Hold the tokenizer to load, or how to train one and on which parts of which units."""

    tokenizer: str | VocabularyTokenizer | JsonTokenizer | TrainWordPiece | TrainByteLevelBPE
    model_max_length: int
    extracted: tuple[Path, ...]
    part_names: tuple[tuple[str, ...], ...]
    fates: tuple[Path, ...]
    train_bytes: int
    seed: int
    named: TokenizerRecord | None = None  # what the tokenizer was where the unit was planned


def _plan(plan: Plan) -> Iterator[Planned]:
    """Yield the one unit of the stage; a tokenizer that is named reads no documents."""
    config = plan.config
    longest = max(config.row_lengths)
    if not isinstance(config.tokenizer, TrainTokenizer):
        assert plan.tokenizer is not None
        task = VocabularyTask(config.tokenizer, longest, (), (), (), 0, config.seed, plan.tokenizer)
        record = plan.tokenizer.model_dump(mode="json")
        yield Planned(task, {"tokenizer": record, "longest": longest})
        return
    of_units = plan.records("deduplicate")[0].result["units"]
    (fates,) = plan.folders("deduplicate")
    task = VocabularyTask(
        tokenizer=config.tokenizer.train,
        model_max_length=longest,
        extracted=plan.folders("extract"),
        part_names=tuple(
            tuple(part["file"] for part in record.result["parts"])
            for record in plan.records("extract")
        ),
        fates=tuple(fates_file(fates, number) for number in range(len(of_units))),
        train_bytes=sum(sum(unit["parts"][TRAIN]) for unit in of_units),
        seed=config.seed,
    )
    keys = {"train": config.tokenizer.train.model_dump(), "longest": longest, "seed": config.seed}
    yield Planned(task, keys, (plan.digest("extract"), plan.digest("deduplicate")))


def vocabulary(task: VocabularyTask, folder: Path) -> dict[str, Any]:
    """Write the tokenizer's files."""
    if isinstance(task.tokenizer, TrainWordPiece | TrainByteLevelBPE):
        tokens = train_tokenizer(lambda: _texts(task), task.tokenizer)
    else:
        tokens = load(task.tokenizer)
    tokens.save(folder, task.model_max_length)
    record = tokens.record()
    if task.named not in (None, record):
        raise CorpusError(
            f"{tokens.origin}: on {socket.gethostname()} it is another tokenizer than where the "
            "command was given, or it has changed since: let all machines have the same files"
        )
    return {"tokenizer": record.model_dump(mode="json"), "normaliser": tokens.normaliser}


def _texts(task: VocabularyTask) -> Iterator[str]:
    share = TEXT_BYTES / max(task.train_bytes, 1)
    for unit, names, file in zip(task.extracted, task.part_names, task.fates, strict=True):
        chosen = np.load(file) == TRAIN
        index = read_index(unit)
        if share < 1:
            draws = (draw(key.tobytes(), task.seed, "vocabulary") for key in index["key"])
            chosen &= np.fromiter(draws, dtype=float, count=len(chosen)) < share
        parts = index["part"]
        for part, name in enumerate(names):
            for _, document in read_part(unit / name, chosen[parts == part]):
                yield document.text


STAGE = Stage(
    "vocabulary",
    _plan,
    vocabulary,
    reads={"extract": ("index.arrow", "part-*"), "deduplicate": ("*-fates.npy",)},
)
