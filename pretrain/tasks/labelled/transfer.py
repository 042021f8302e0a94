"""Change the texts of examples, for a student that learns what its teacher says of them.

The transfer set of the distilled BiLSTM (Tang et al. 2019, arXiv 1903.12136, section 3.2), drawn
again in each epoch where the paper writes 20 copies: a word becomes [MASK] with probability
`masked`, and with probability `ngrams` only one to five successive words stay. Of a pair either
text changes, or both. Where all words that stay would be masked, they are not.

The paper also puts other words of the same part of speech in place of words. That needs a tagger
for each language, and its effect is reached without (docs/papers/bilstm.md), so it is not here.

What changes is a pure function of (seed, epoch, row). Shapes: R rows, L row length, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pretrain.data.hashing import derive, root
from pretrain.tasks.mlm.words import Borders, draw_words

_CHANGING = 5  # this use of the seed; order, masking, dropout and Theseus have other numbers
_LONGEST = 5  # words


class Transfer(NamedTuple):
    """Hold how texts change, and what words and special tokens are."""

    masked: float
    ngrams: float
    seed: int
    words: Borders
    special: NDArray[np.bool_]  # [V]
    mask: int
    pad: int
    frame: tuple[int, ...]  # ids of what stands around texts: [CLS], [SEP], padding

    def __call__(
        self, ids: NDArray[Any], second: NDArray[Any], epochs: Any, numbers: Any
    ) -> NDArray[np.bool_]:
        """Change rows in place; return which ones differ [R].

        Args:
            ids: of the tokens [R, L].
            second: where the second text begins, 0 if there is none [R].
            epochs, numbers: of each row [R].
        """
        before, length = ids.copy(), ids.shape[1]
        epochs, numbers = (np.asarray(x, dtype=np.uint32) for x in (epochs, numbers))
        key_R = derive(derive(root(self.seed, _CHANGING), epochs), numbers)
        # A draw for each position, and six for the row.
        draw = derive(key_R[:, None], np.arange(length + 6, dtype=np.uint32))
        wide = ids.astype(np.int64)
        drawn = draw_words(draw[:, :length], wide, self.words, self.special)
        for i, (own, word, of_word) in enumerate(
            zip(draw[:, length:].astype(np.int64), drawn.word, drawn.draw, strict=True)
        ):
            row, begins = ids[i], second[i]
            sides = [~np.isin(row, self.frame)]  # unknown words are words
            if begins > 0:
                behind = np.arange(length) >= begins
                sides = [sides[0] & ~behind, sides[0] & behind]
                if own[0] % 3 < 2:  # otherwise both
                    sides = [sides[own[0] % 3]]
            kept = np.ones(length, dtype=bool)
            for side, size, place in zip(sides, own[2:4], own[4:6], strict=False):
                words, num = np.unique(word[side]), 1 + size % _LONGEST
                if own[1] < self.ngrams * 2**32 and len(words) > num:
                    first = words[place % (len(words) - num + 1)]
                    kept &= ~side | ((word >= first) & (word < first + num))
                masked = side & kept & (of_word < self.masked * 2**32) & ~self.special[row]
                if not masked[side & kept].all():
                    row[masked] = self.mask
            left = row[kept]
            row[: len(left)], row[len(left) :] = left, self.pad
            second[i] = np.count_nonzero(kept[:begins])
        return (ids != before).any(axis=1)
