"""Draw whole words, or spans of words, in place of single tokens, for masking.

Every token of a word gets the draw of its word, and every word of a span the draw of its span, so
that selecting the smallest draws selects them whole. All are integer hashes, see `masking`.

Shapes: B rows, L row length, V vocabulary.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

LONGEST = 10  # words of a span: lengths are geometric with p = 0.2 up to it (SpanBERT, section 3.1)
_SPACES = "\u0120\u010a\u0109\u2581"  # how tokens spell a space, line end or tab at their beginning
_NO_DRAW = 1 << 32  # above every 32-bit draw
# P(length <= k) in units of 2**-32, for k from 1: weights 0.2 * 0.8**(k - 1) are 4**(k - 1) *
# 5**(10 - k) as integers, so every machine has the same table.
_WEIGHTS = [4**k * 5 ** (LONGEST - 1 - k) for k in range(LONGEST)]
_UP_TO = np.array(
    [(sum(_WEIGHTS[: k + 1]) << 32) // sum(_WEIGHTS) for k in range(LONGEST)], dtype=np.uint64
)


class Drawn(NamedTuple):
    """Hold the draws that select whole words."""

    draw: NDArray[np.int64]  # [B, L] of a token's word or span
    word: NDArray[np.int64]  # [B, L] number of a token's word in its row
    origin: NDArray[np.int64]  # [B, L] first position of a token's word or span


def continuations(tokenizer_json: bytes) -> NDArray[np.bool_]:
    """Return which tokens of a vocabulary go on with the word of the token before [V].

    In WordPiece these begin with ##. In byte-level BPE and SentencePiece they are letters or digits
    without the mark of a space before them, so punctuation is a word.

    Raises:
        ValueError: the tokenizer has no words: single symbols by a pattern, for instance.
    """
    state = json.loads(tokenizer_json)
    model = state["model"]
    vocabulary = model["vocab"]
    tokens: list[str] = (
        sorted(vocabulary, key=vocabulary.__getitem__)
        if isinstance(vocabulary, dict)
        else [token for token, _ in vocabulary]
    )
    kinds = {step.get("type") for step in _steps(state.get("pre_tokenizer"))}
    if model["type"] == "WordPiece":
        prefix = model["continuing_subword_prefix"]
        goes_on = [token.startswith(prefix) and token != prefix for token in tokens]
    elif "ByteLevel" in kinds or "Metaspace" in kinds:
        goes_on = [token[:1].isalnum() and token[0] not in _SPACES for token in tokens]
    else:
        raise ValueError(f"its tokenizer is a {model['type']} without marks of word borders")
    return np.array(goes_on)


def _steps(state: Any) -> list[dict[str, Any]]:
    """Return a pre-tokenizer's steps, itself if it is one."""
    if not isinstance(state, dict):
        return []
    return [step for inner in state.get("pretokenizers", []) for step in _steps(inner)] + [state]


def draw_words(
    draw: NDArray[np.uint32],
    ids: NDArray[np.int64],
    goes_on: NDArray[np.bool_],
    special: NDArray[np.bool_],
    lengths: NDArray[np.uint32] | None = None,
) -> Drawn:
    """Give every token the draw of its word, or of the span with the smallest draw that reaches it.

    A span begins at every word, with that word's draw, and ends before a special token.

    Args:
        draw: 32-bit hashes of the positions [B, L].
        ids: of the tokens [B, L].
        goes_on: of `continuations`, as long as the vocabulary [V].
        special: which tokens of the vocabulary are special; no word reaches over one [V].
        lengths: 32-bit hashes of the positions [B, L], from which lengths of spans follow; None
            draws words.
    """
    num_rows, length = ids.shape
    # Words: a token begins one unless it goes on with the one before, which is not special.
    borders = special[ids]
    begins = ~goes_on[ids] | borders
    begins[:, 0] = True
    begins[:, 1:] |= borders[:, :-1]
    first = np.maximum.accumulate(np.where(begins, np.arange(length), 0), axis=1)
    word = np.cumsum(begins, axis=1) - 1
    by_word = np.take_along_axis(draw, first, axis=1).astype(np.int64)
    if lengths is None:
        return Drawn(by_word, word, first)

    # Spans: the same by number of word [B, L]; entries behind a row's last word reach nothing.
    row = np.arange(num_rows)[:, None]
    origin = np.full((num_rows, length), length - 1)
    own = np.full((num_rows, length), _NO_DRAW, dtype=np.int64)
    document = np.full((num_rows, length), -1)
    reach = np.zeros((num_rows, length), dtype=np.int64)
    sizes = 1 + np.searchsorted(_UP_TO, lengths.astype(np.uint64), side="right")
    origin[row, word], own[row, word] = first, by_word
    document[row, word] = np.cumsum(borders, axis=1)
    reach[row, word] = np.take_along_axis(sizes, first, axis=1)
    # The span of a word reaches the next `reach` words of its document, itself included.
    best, source = own.copy(), origin.copy()
    for far in range(1, LONGEST):
        reaches = (reach[:, :-far] > far) & (document[:, :-far] == document[:, far:])
        better = reaches & (own[:, :-far] < best[:, far:])
        best[:, far:] = np.where(better, own[:, :-far], best[:, far:])
        source[:, far:] = np.where(better, origin[:, :-far], source[:, far:])
    # Back from words to tokens.
    of_tokens = (np.take_along_axis(values, word, axis=1) for values in (best, source))
    by_span, of_span = of_tokens
    return Drawn(by_span, word, of_span)
