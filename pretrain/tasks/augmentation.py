"""Write more texts like those of a task: the data augmentation of TinyBERT (arXiv 1909.10351).

Algorithm 1 there: each word of a text gets candidates, the M most likely words where a masked
language model reads [MASK] in its place, or, for a word of several pieces, the M words whose input
embeddings are nearest to the mean of its pieces: of the same model, at length 1. In each of N
copies a word becomes a random one of its candidates with probability p. Copies that differ from all
texts before them are kept.

The authors' code shows the original text behind the masked one, so a word is usually its own first
candidate; here it is none. It leaves a list of English words as they are; here the most frequent
ones of the texts. Of a pair each text is changed beside the original of the other.

Shapes: B texts, L tokens, V vocabulary, D width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch.nn.functional import linear, normalize

from data_prep.shards import Manifest, open_shards, read_listed
from pretrain import RunError
from pretrain.model.families import family_of, has_types
from pretrain.model.folder import Loaded, read_model
from pretrain.model.loading import check_row_length
from pretrain.model.teacher import check_tokenizer
from pretrain.tasks.labelled import LabelledRows
from pretrain.tasks.mlm.examples import special_tokens, words_of
from pretrain.tasks.mlm.words import draw_words

_TOGETHER = 64  # texts that the model reads at a time


class Augmentation(NamedTuple):
    """Hold the settings: p, M and N of the paper, and how many frequent words stay."""

    probability: float = 0.4
    candidates: int = 15
    copies: int = 20
    frequent: int = 50
    seed: int = 0


class Word(NamedTuple):
    """Hold where a word is among the tokens of a text: from `begin` to before `end`."""

    begin: int
    end: int


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
        check_tokenizer(f"words {model}", loaded.folder, loaded.model, manifest, shards)
        check_row_length(f"words {model}", loaded.model.config, manifest)
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


class Words:
    """Tell the words of a task's texts, and what may stand in their place.

    Args:
        shards, manifest: of the task.
        model: with a trained LM head and the shards' vocabulary.
    """

    def __init__(self, shards: Path, manifest: Manifest, model: Any) -> None:
        fix = "prepare the examples with another tokenizer"
        self.borders = words_of(shards, manifest, "stage augment", fix)
        ids, size = manifest.tokenizer.special_ids, len(self.borders.goes_on)
        self.model, self.mask, self.pad = model, ids.mask, ids.pad
        self.special = special_tokens(manifest, size)
        tokenizer = read_listed(shards, manifest, "tokenizer/tokenizer.json")
        self.tokenizer = Tokenizer.from_str(tokenizer.decode())
        whole = np.array([self.is_alphabetic((id,)) for id in range(size)])
        # Only these are put into a text.
        self.usable = torch.from_numpy(whole & ~self.borders.goes_on & ~self.special)
        table_VD = model.get_input_embeddings().weight.detach().float()
        self.table_VD = normalize(table_VD[:size], dim=-1)

    def text(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """Return the text of some tokens."""
        return str(self.tokenizer.decode([int(id) for id in ids]))

    def is_alphabetic(self, ids: Sequence[int]) -> bool:
        """Return whether some tokens are letters alone."""
        return self.text(ids).strip().isalpha()

    def of(self, row: NDArray[Any]) -> list[Word]:
        """Return the words of a row in their order, without special tokens."""
        ids = row[None].astype(np.int64)
        draws = np.zeros(ids.shape, dtype=np.uint32)
        number = draw_words(draws, ids, self.borders, self.special).word[0]
        begins = np.flatnonzero(np.diff(number, prepend=-1)).tolist()
        ends = [*begins[1:], len(row)]
        return [Word(*w) for w in zip(begins, ends, strict=True) if not self.special[row[w[0]]]]

    @torch.inference_mode()
    def candidates(
        self, row: NDArray[Any], words: Sequence[Word], second: int, most: int
    ) -> list[NDArray[np.int64]]:
        """Return the candidates of some words of a text, the best first, without themselves."""
        if not words:
            return []
        ids_L = torch.from_numpy(row.astype(np.int64))
        types_L = (torch.arange(len(row)) >= second).long() * (second > 0)
        scores = []
        single = [word.begin for word in words if word.end == word.begin + 1]
        for first in range(0, len(single), _TOGETHER):
            places_B = torch.tensor(single[first : first + _TOGETHER])
            index_B = torch.arange(len(places_B))
            ids_BL = ids_L.repeat(len(places_B), 1)
            ids_BL[index_B, places_B] = self.mask
            more = {"token_type_ids": types_L.expand_as(ids_BL)} if has_types(self.model) else {}
            hidden_BLD = self.model.base_model(input_ids=ids_BL, **more).last_hidden_state
            masked_BD = hidden_BLD[index_B, places_B]
            projection = family_of(self.model).projection(self.model, masked_BD)
            scores += [*linear(*projection.first(len(self.usable)))]
        predicted = iter(scores)
        found = []
        for begin, end in words:
            pieces_D = self.table_VD[ids_L[begin:end]].mean(0)
            scores_V = next(predicted) if end == begin + 1 else self.table_VD @ pieces_D
            scores_V = scores_V.masked_fill(~self.usable, -torch.inf)
            if end == begin + 1:
                scores_V[ids_L[begin]] = -torch.inf
            best = scores_V.topk(min(most, len(scores_V)))
            found.append(best.indices[best.values > -torch.inf].numpy())
        return found
