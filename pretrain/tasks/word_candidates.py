"""Find words that may stand in the place of a text's words: TinyBERT's candidates.

They are the M most likely words where a masked language model reads [MASK] in a word's place, or,
for a word of several pieces, the M words whose input embeddings are nearest to the mean of its
pieces: of the same model, at length 1.

Shapes: B texts, L tokens, V vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch.nn.functional import linear, normalize

from data_prep.shards import Manifest, read_listed
from pretrain.model.families import family_of, has_types
from pretrain.model.tokenizer_files import tells_pairs
from pretrain.tasks.mlm.examples import special_tokens, words_of
from pretrain.tasks.mlm.words import draw_words

_TOGETHER = 64  # texts that the model reads at a time


class Word(NamedTuple):
    """Hold where a word is among the tokens of a text: from `begin` to before `end`."""

    begin: int
    end: int


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
        self.typed = has_types(model) and tells_pairs(shards, manifest)
        whole = np.array([self.is_alphabetic((id,)) for id in range(size)])
        # Only these are put into a text.
        self.usable = torch.from_numpy(whole & ~self.borders.goes_on & ~self.special)
        table_VD = model.get_input_embeddings().weight.detach().float()
        self.table_VD = normalize(table_VD[:size], dim=-1)

    def text(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """Return the text of some tokens."""
        return str(self.tokenizer.decode([int(id) for id in ids]))

    def is_alphabetic(self, ids: Sequence[int]) -> bool:
        """Return whether some tokens are only letters."""
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
            more = {"token_type_ids": types_L.expand_as(ids_BL)} if self.typed else {}
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
