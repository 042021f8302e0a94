"""Draw whole words in place of single tokens, for masking.

Every token of a word gets the draw of its word, so that selecting the smallest draws selects words
whole. All are integer hashes, see `masking`.

Shapes: B rows, L row length, V vocabulary.
"""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_SPACE = "\u2581"  # how SentencePiece spells a space
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a byte that a SentencePiece vocabulary falls back to
# Scripts that put no space between words, by the first word of a character's name.
_UNSPACED = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN")
_NEVER = 1 << 62


class Drawn(NamedTuple):
    """Hold the draws that select whole words."""

    draw: NDArray[np.int64]  # [B, L] of a token's word
    word: NDArray[np.int64]  # [B, L] number of a token's word in its row


class Borders(NamedTuple):
    """Hold where words begin, for each token of a vocabulary."""

    goes_on: NDArray[np.bool_]  # [V] it continues the word of the token before
    joins: NDArray[np.bool_]  # [V] it does so after punctuation, too: it begins inside a character
    closes: NDArray[np.bool_]  # [V] no word continues after it: it ends in punctuation
    inherits: NDArray[np.bool_]  # [V] it has no character's first byte: it closes as the one before
    unspaced: NDArray[np.bool_]  # [V] it begins with a letter of a script without spaces


def borders(tokenizer_json: bytes) -> Borders:
    """Return the borders of words in texts that a tokenizer has encoded.

    In WordPiece, tokens with the prefix ## continue a word. In byte-level BPE and SentencePiece a
    token continues a word if it begins with a letter, a combining sign or a digit (Unicode's
    categories L, M and N), or in the middle of a character, unless it follows a space or
    punctuation. In scripts without spaces each token is a word, with the combining signs behind it;
    in WordPiece too.

    Raises:
        ValueError: the tokenizer has no words: single symbols by a pattern, for instance.
    """
    state = json.loads(tokenizer_json)
    model = state["model"]
    vocabulary = model["vocab"]
    ids: dict[str, int] = (
        vocabulary
        if isinstance(vocabulary, dict)
        else {token: id for id, (token, _) in enumerate(vocabulary)}
    )
    size = max(ids.values(), default=-1) + 1  # an id may have no token
    found = Borders(*(np.zeros(size, dtype=bool) for _ in Borders._fields))
    steps = [*_steps(state.get("pre_tokenizer")), *_steps(state.get("normalizer"))]
    kinds = {step.get("type") for step in steps}
    if model["type"] == "WordPiece":
        prefix = model["continuing_subword_prefix"]
        for token, id in ids.items():
            rest = token.removeprefix(prefix).encode(errors="replace")
            kind, found.unspaced[id] = first_kind(rest)
            continues = token.startswith(prefix) and token != prefix
            found.goes_on[id] = continues and (kind == "M" or not found.unspaced[id])
        return found
    if "ByteLevel" in kinds:
        alphabet = byte_alphabet()

        def spelled(token: str) -> bytes:
            # A token that was added to the vocabulary is plain text.
            if not all(character in alphabet for character in token):
                return token.encode()
            return bytes(alphabet[character] for character in token)

        space = b" "
    elif "Metaspace" in kinds or any(token.startswith(_SPACE) for token in ids):

        def spelled(token: str) -> bytes:
            fallback = _BYTE.fullmatch(token)
            return bytes([int(fallback[1], 16)]) if fallback else token.encode(errors="replace")

        space = _SPACE.encode()
    else:
        raise ValueError(f"its tokenizer is a {model['type']} without marks of word borders")
    for token, id in ids.items():
        data = spelled(token)
        marked = data.startswith(space)
        text = data.removeprefix(space)
        kind, unspaced = first_kind(text)
        found.unspaced[id] = unspaced
        # A token that is only the mark belongs to the word of the next token.
        found.joins[id] = not marked and kind == "M" and bool(text)
        found.goes_on[id] = found.joins[id] or (not marked and kind in "LN" and not unspaced)
        last, last_unspaced = last_kind(text)
        found.closes[id] = bool(text) and (last not in "LMN" or last_unspaced)
        found.inherits[id] = bool(text) and all(0x80 <= byte < 0xC0 for byte in text)
    return found


@cache
def byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for."""
    # GPT-2's: printable characters of Latin-1 are themselves, the others are numbered from 256.
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    found = {chr(byte): byte for byte in plain}
    found |= {chr(256 + i): byte for i, byte in enumerate(others)}
    return found


def first_kind(text: bytes) -> tuple[str, bool]:
    """Return (Unicode category of the first character, whether its script has no spaces).

    A text may begin in the middle of a character: that continues whatever was begun, as M does. Of
    a character that is not whole, the category is that of most characters that begin so.
    """
    if not text:
        return "M", False
    lead = text[0]
    if 0x80 <= lead < 0xC0:
        return "M", False
    length = 1 + (lead >= 0xC0) + (lead >= 0xE0) + (lead >= 0xF0)
    if lead >= 0xF8:  # no byte of UTF-8
        return "S", False
    if len(text) >= length:
        character = text[:length].decode(errors="replace")[0]
        kind = unicodedata.category(character)
        # Joiners and other marks without a shape (Cf) stand inside words, as combining signs do.
        return "M" if kind == "Cf" else kind[0], _is_unspaced(character)
    return _kind_of_most(bytes(text))


def last_kind(text: bytes) -> tuple[str, bool]:
    """Return the category of a text's last character, and if it is unspaced; see `first_kind`."""
    begin = max((i for i, byte in enumerate(text) if not 0x80 <= byte < 0xC0), default=0)
    return first_kind(text[begin:])


@cache
def _kind_of_most(begin: bytes) -> tuple[str, bool]:
    length = 2 + (begin[0] >= 0xE0) + (begin[0] >= 0xF0)
    # The first and the last code point whose UTF-8 begins with these bytes.
    first, last = begin[0] & (0xFF >> (length + 1)), begin[0] & (0xFF >> (length + 1))
    for place in range(1, length):
        known = begin[place] & 0x3F if place < len(begin) else None
        first = first << 6 | (0 if known is None else known)
        last = last << 6 | (0x3F if known is None else known)
    shortest = (0x80, 0x800, 0x10000)[length - 2]  # a smaller one has fewer bytes
    points = range(max(first, shortest), min(last, sys.maxunicode) + 1)
    characters = [c for c in map(chr, points) if unicodedata.category(c)[0] != "C"]
    letters = sum(unicodedata.category(c)[0] in "LMN" for c in characters)
    unspaced = sum(map(_is_unspaced, characters))
    return ("L" if 2 * letters > len(characters) else "S"), 2 * unspaced > len(characters)


def _is_unspaced(character: str) -> bool:
    return unicodedata.name(character, "").startswith(_UNSPACED) if character else False


def _steps(state: Any) -> list[dict[str, Any]]:
    """Return a pre-tokenizer's steps, itself if it is one."""
    if not isinstance(state, dict):
        return []
    return [step for inner in state.get("pretokenizers", []) for step in _steps(inner)] + [state]


def draw_words(
    draw: NDArray[np.uint32],
    ids: NDArray[np.int64],
    words: Borders,
    special: NDArray[np.bool_],
) -> Drawn:
    """Give every token the draw of its word.

    Args:
        draw: 32-bit hashes of the positions [B, L].
        ids: of the tokens [B, L].
        words: the borders of words, over the whole vocabulary.
        special: which tokens of the vocabulary are special; no word reaches over one [V].
    """
    length = ids.shape[1]
    # A token begins a word unless it continues the token before it, which must not be special.
    around = special[ids]
    begins = ~words.goes_on[ids] | around
    begins[:, 0] = True
    begins[:, 1:] |= around[:, :-1]
    # After punctuation; the last bytes of a character close a word if its first ones do.
    source = np.where(words.inherits[ids], 0, np.arange(length))
    closed = np.take_along_axis(words.closes[ids], np.maximum.accumulate(source, axis=1), axis=1)
    begins[:, 1:] |= closed[:, :-1] & ~words.joins[ids[:, 1:]]
    first = np.maximum.accumulate(np.where(begins, np.arange(length), 0), axis=1)
    word = np.cumsum(begins, axis=1) - 1
    by_word = np.take_along_axis(draw, first, axis=1).astype(np.int64)
    return Drawn(by_word, word)


def choose_words(
    drawn: Drawn, selectable: NDArray[np.bool_], wanted: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return which tokens are selected: whole words in the order of their draws [B, L].

    A word that does not fit into what is left of `wanted` is passed over for the next one. If none
    fits, the first one is cut.

    Args:
        drawn: of `draw_words`.
        selectable: tokens that may be selected; a word is selectable or not as a whole [B, L].
        wanted: how many tokens to select [B].
    """
    num_rows, length = drawn.word.shape
    row = np.arange(num_rows)[:, None]
    # By number of word [B, L]: tokens, and draws. What cannot be selected comes last, with size 0.
    flat = (drawn.word + row * length)[selectable]
    sizes = np.bincount(flat, minlength=num_rows * length).reshape(num_rows, length)
    draws = np.full((num_rows, length), _NEVER, dtype=np.int64)
    draws.reshape(-1)[flat] = drawn.draw[selectable]
    order = np.argsort(draws, axis=1, kind="stable")  # if draws are equal, the first word wins
    sizes = np.take_along_axis(sizes, order, axis=1)
    # All words up to the first that does not fit, then one at a time those that do.
    taken = np.cumsum(sizes, axis=1) <= wanted[:, None]
    left = wanted - (sizes * taken).sum(1)
    place = taken.sum(1) + 1
    while (open_rows := np.flatnonzero((left > 0) & (place < length))).size:
        at = place[open_rows]
        size = sizes[open_rows, at]
        fits = (size > 0) & (size <= left[open_rows])
        taken[open_rows, at] = fits
        left[open_rows] -= size * fits
        place[open_rows] = np.where(size > 0, at + 1, length)  # behind the last word
    none = (left == wanted) & (wanted > 0)
    taken[none, 0] = True
    by_word = np.zeros_like(taken)
    np.put_along_axis(by_word, order, taken & (sizes > 0), axis=1)
    chosen = np.take_along_axis(by_word, drawn.word, axis=1) & selectable
    chosen[none] &= np.cumsum(chosen[none], axis=1) <= wanted[none, None]
    return chosen
