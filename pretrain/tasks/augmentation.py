"""Write more texts like those of a task: the data augmentation of TinyBERT (arXiv 1909.10351).

Algorithm 1 there: each word of a text gets M candidates (`word_candidates.py`). In each of N copies
a word becomes a random one of its candidates with probability p. Copies that differ from all texts
before them are kept.

The authors' code shows the original text behind the masked one, so a word is usually its own first
candidate; here it is none. It leaves a list of English words as they are; here the most frequent
ones of the texts. Of a pair each text is changed beside the original of the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_prep.shards import open_shards
from pretrain import RunError
from pretrain.model.folder import Loaded, read_model
from pretrain.model.loading import check_row_length
from pretrain.model.teacher import check_tokenizer
from pretrain.tasks.labelled import LabelledRows
from pretrain.tasks.word_candidates import Word, Words


class Augmentation(NamedTuple):
    """Hold the settings: p, M and N of the paper, and how many frequent words stay."""

    probability: float = 0.4
    candidates: int = 15
    copies: int = 20
    frequent: int = 50
    seed: int = 0


def augmented(
    shards: Path, model: str, settings: Augmentation, say: Callable[[str], None]
) -> Iterator[dict[str, str]]:
    """Yield the new texts of the training examples of a task, each with `text` and maybe `pair`.

    Args:
        shards: of the task; validation examples are in another split, and are not read.
        model: a masked language model with the shards' tokenizer.
        settings: of the augmentation.
        say: receives how many examples are done.

    Raises:
        RunError: the model does not fit the shards, the tokenizer has no words, or no text is new.
    """
    rows = LabelledRows(open_shards(shards))
    manifest, seconds = rows.shards.manifest, rows.columns["second"]

    def read(loaded: Loaded) -> Any:
        config = loaded.model.config
        check_tokenizer(f"words {model}", loaded.folder, config, manifest, shards)
        check_row_length(f"words {model}", config, manifest)
        return loaded.model.eval()

    words = Words(shards, manifest, read_model(model, read, who=f"words {model}"))
    every = rows.shards.rows(np.arange(len(rows.shards)))
    texts = [words.of(row) for row in every]
    spelled = [
        [tuple(row[w.begin : w.end]) for w in of] for row, of in zip(every, texts, strict=True)
    ]
    counts = Counter(word for of in spelled for word in of)
    frequent = {word for word, _ in counts.most_common(settings.frequent)}
    unknown = manifest.tokenizer.special_ids.unk
    left = sum(unknown in row for row in every)
    if left:
        say(f"{left:,} of {len(every):,} examples have unknown words, and stay as they are")
    seen, found, pad = {row[row != words.pad].tobytes() for row in every}, 0, words.pad
    for number, (row, own, spellings) in enumerate(zip(every, texts, spelled, strict=True)):
        if number % 1000 == 0:
            say(f"{number:,} of {len(every):,} examples, {found:,} new texts")
        if unknown in row:  # whose text the shards do not have
            continue
        second, draw = int(seconds[number]), np.random.default_rng([settings.seed, number])
        row = row[row != pad]
        own = [
            word
            for word, spelling in zip(own, spellings, strict=True)
            if spelling not in frequent and words.is_alphabetic(spelling)
        ]
        choices = words.candidates(row, own, second, settings.candidates)
        for begin, end in [(0, second), (second, len(row))] if second else [(0, len(row))]:
            for _ in range(settings.copies):
                chosen = {}
                for word, candidates in zip(own, choices, strict=True):
                    here = begin <= word.begin < end and len(candidates)
                    if here and draw.random() < settings.probability:
                        chosen[word] = draw.choice(candidates)
                new, moved = replaced(row, chosen, second)
                if new.tobytes() in seen:
                    continue
                seen.add(new.tobytes())
                found += 1
                parts = [new[:moved], new[moved:]] if second else [new]
                yield dict(zip(("text", "pair"), map(words.text, parts), strict=False))
    if not found:
        raise RunError(
            f"{shards}: no text became another one: raise probability or copies, or lower frequent"
        )


def replaced(
    row: NDArray[Any], chosen: Mapping[Word, int], second: int
) -> tuple[NDArray[Any], int]:
    """Return a text with other words, and where its second part begins then."""
    parts: list[Any] = []
    last, moved = 0, second
    for word, id in chosen.items():  # in their order in the text
        parts += [row[last : word.begin], [id]]
        last = word.end
        moved -= (word.end - word.begin - 1) * (word.begin < second)
    return np.concatenate([*parts, row[last:]]).astype(row.dtype), moved
