"""The tokenizer of a corpus: the one that was named, or one trained on its training documents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.config import JsonTokenizer, TrainWordPiece, VocabularyTokenizer
from data_prep.duplicates.dedup import draw
from data_prep.pipeline.stages.deduplicate import TRAIN
from data_prep.pipeline.stages.documents import read_index, read_part
from data_prep.tokens import load
from data_prep.tokens.wordpiece import stripped_words, train

# A vocabulary needs no more text than this, and the trainer's memory grows with its words.
TEXT_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class VocabularyTask:
    """What to load, or how to train and on which `parts`: (file, unit of extraction, number)."""

    tokenizer: str | VocabularyTokenizer | JsonTokenizer | TrainWordPiece
    model_max_length: int
    extracted: tuple[Path, ...]
    part_names: tuple[tuple[str, ...], ...]
    fates: tuple[Path, ...]
    train_bytes: int
    seed: int


def vocabulary(task: VocabularyTask, folder: Path) -> dict[str, Any]:
    """Write the tokenizer's files."""
    accents = {}
    if isinstance(task.tokenizer, TrainWordPiece):
        tokens = train(lambda: _texts(task), task.tokenizer)
        if task.tokenizer.strip_accents:
            accents = {"accents": stripped_words(_texts(task))}
    else:
        tokens = load(task.tokenizer)
    tokens.save(folder, task.model_max_length)
    record = tokens.record().model_dump(mode="json")
    return {"tokenizer": record, "normaliser": tokens.normaliser, **accents}


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
