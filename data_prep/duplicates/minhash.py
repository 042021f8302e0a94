"""Hash the words of a text, and compute MinHash signatures that find nearly equal texts.

Broder, "On the resemblance and containment of documents" (1997): two texts resemble each other as
much as their sets of shingles (runs of SHINGLE words) overlap, Jaccard J = |A and B| / |A or B|.
A signature has NUM_PERMUTATIONS slots, of which two texts share a fraction J, give or take
sqrt(J (1 - J) / 128): 0.035 at J = 0.8. The slots come from rensa's RMinHash (after Dahlgaard,
Knudsen and Thorup, "Fast Similarity Sketching", 2017): all shingles count, in any order.

Slots are banded (Leskovec et al., "Mining of Massive Datasets", 3.4): two texts are candidates if
they agree in all ROWS slots of one of NUM_BANDS bands, with probability 1 - (1 - J^6)^21:

    J            0.2     0.3    0.4    0.5    0.6    0.7    0.8     0.9
    candidates   0.13 %  1.5 %  8.3 %  28 %   63 %   92.8 % 99.83 % 99.99 %

On disk a document takes 4 * 128 bytes of signature and a hash for each of 21 bands.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

SHINGLE = 5
NUM_PERMUTATIONS = 128  # a power of two: rensa is fastest with one
NUM_BANDS = 21
ROWS = 6  # 21 * 6 = 126: two slots serve only `similarity`

WORDS = "words 1"  # goes up when `word_hashes` returns other hashes

_PIECE = 1 << 16  # characters of a text hashed at once: temporary arrays stay in the cache
_SLICE = 1 << 16  # words at once, for the same reason
_LONGEST = 64  # bytes; a longer word (a protein, base64) counts as several
_CALL = 256  # texts in one call of rensa, which returns lists of Python's integers

_ALONE = 1 << 31  # flags the letters of scripts that put no spaces between words
_SCRIPTS_WITHOUT_SPACES = (
    *((0x0E00, 0x0F00), (0x1000, 0x10A0), (0x1780, 0x1800)),  # Thai, Lao; Myanmar; Khmer
    *((0x3005, 0x3008), (0x3041, 0x3100), (0x31F0, 0x3200)),  # Japanese
    *((0x3400, 0x4DC0), (0x4E00, 0xA000), (0xF900, 0xFB00), (0x20000, 0x3FFFE)),  # Han
)
_FIRST_BYTES = np.array([(1 << 8 * count) - 1 for count in range(9)], dtype=np.uint64)
_ODD = np.uint64(0x9E3779B97F4A7C15)


def word_hashes(text: str) -> Words:
    """Return a hash of every word of a text, in order, [words].

    A word is a run of letters, marks and digits, compared without case or compatibility forms;
    each character is one where words are written without spaces (Han, kana, Thai, Lao, Khmer,
    Burmese). Text is expected as `cleaning.clean` returns it. Words of up to 8 bytes never collide.
    """
    hashes: list[Words] = []
    start = 0
    while start < len(text) or not hashes:
        end = start + _PIECE
        if end < len(text):
            end = max(text.rfind(" ", start, end), text.rfind("\n", start, end)) + 1 or end
        hashes.append(_hash(text[start:end]))
        start = end
    return hashes[0] if len(hashes) == 1 else np.concatenate(hashes)


def ngrams(words: Words, n: int) -> Words:
    """Return a hash of every `n` consecutive words, in their order, [max(0, words - n + 1)]."""
    size = max(0, len(words) - n + 1)
    hashes = words[:size].copy()
    for offset in range(1, n):
        hashes *= _ODD
        hashes += words[offset : offset + size]
    return _mixed(hashes)


def signatures(
    texts: Sequence[str], least: int = SHINGLE
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]:
    """Return (signatures [texts, NUM_PERMUTATIONS], whether each text has one [texts]).

    A text of fewer than `least` words has none: its row must not be used. Memory beyond the result
    is a small multiple of the longest text.
    """
    result = np.full((len(texts), NUM_PERMUTATIONS), 0xFFFFFFFF, dtype=np.uint32)
    usable = np.zeros(len(texts), dtype=bool)
    numbers: list[int] = []
    shingles: list[Words] = []
    size = 0

    def flush() -> None:
        for number, row in zip(numbers, _sketched(shingles), strict=True):
            # The minimum of the signatures of two sets is the signature of their union.
            np.minimum(result[number], row, out=result[number])

    for number, text in enumerate(texts):
        words = word_hashes(text)
        usable[number] = len(words) >= max(least, SHINGLE)
        for start in range(0, len(words) - SHINGLE + 1, _SLICE):
            numbers.append(number)
            shingles.append(ngrams(words[start : start + _SLICE + SHINGLE - 1], SHINGLE))
            size += len(shingles[-1])
            if size >= _SLICE or len(numbers) == _CALL:
                flush()
                numbers, shingles, size = [], [], 0
    flush()
    return result, usable


def bands(signatures: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
    """Return a hash of each band of `signatures` [n, NUM_PERMUTATIONS], [n, NUM_BANDS].

    The band's number goes in: equal hashes mean equal bands at the same place.
    """
    slots = np.ascontiguousarray(signatures[:, : NUM_BANDS * ROWS], dtype="<u4")
    pairs = slots.view("<u8").reshape(len(slots), NUM_BANDS, ROWS // 2)
    hashes = np.zeros((len(slots), NUM_BANDS), dtype=np.uint64)
    hashes += np.arange(1, NUM_BANDS + 1, dtype=np.uint64)
    for column in range(ROWS // 2):
        hashes = _mixed(_mixed(hashes) ^ pairs[:, :, column])
    return hashes


def similarity(a: npt.NDArray[np.uint32], b: npt.NDArray[np.uint32]) -> npt.NDArray[np.float64]:
    """Return the estimated Jaccard of each pair of signatures [n, NUM_PERMUTATIONS], [n]."""
    return np.asarray((a == b).mean(axis=1))


def _sketched(shingles: Sequence[Words]) -> npt.NDArray[np.uint32]:
    if not shingles:
        return np.empty((0, NUM_PERMUTATIONS), dtype=np.uint32)
    from rensa import RMinHash  # here, because only near duplicates need it

    ends = np.cumsum([0, *map(len, shingles)], dtype=np.uint64)
    flat = np.concatenate(shingles)
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(flat, ends, NUM_PERMUTATIONS, 0)
    return np.array(matrix.to_rows(), dtype=np.uint32)


@cache
def _tables() -> tuple[npt.NDArray[np.uint32], bytes]:
    """Build the table of what stands for each code point in a word, 0 for none; ASCII as bytes.

    The last entry serves all later code points. Only what folds to one character is folded.
    """
    table = np.zeros(0x40000, dtype="<u4")
    for code in range(0x20000):
        normal = unicodedata.normalize("NFKC", chr(code))
        character = normal if len(normal) == 1 else chr(code)
        if unicodedata.category(character)[0] in "LMN":
            folded = character.casefold()
            table[code] = ord(folded if len(folded) == 1 else character)
    table[0x20000:] = np.arange(0x20000, 0x40000)
    for first, end in _SCRIPTS_WITHOUT_SPACES:
        table[(table >= first) & (table < end)] |= _ALONE
    table[-2:] = 0
    return table, table[:256].astype(np.uint8).tobytes()


def _hash(text: str) -> Words:
    """Hash every word of a text, reading eight bytes of each at a time."""
    # The words in UTF-8, separated by NUL bytes.
    if text.isascii():
        words = text.encode().translate(_tables()[1])
    else:
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
        folded = _tables()[0].take(codes, mode="clip")
        if folded.max() >= _ALONE:
            alone = folded >= _ALONE
            folded &= np.uint32(_ALONE - 1)
            widths = np.where(alone, 3, 1)
            spaced = np.zeros(widths.sum(), dtype="<u4")
            spaced[np.cumsum(widths) - np.where(alone, 2, 1)] = folded
            folded = spaced
        words = folded.tobytes().decode("utf-32-le").encode()
    padded = b"\0" + words + bytes(9)
    is_letter = np.frombuffer(padded, dtype=np.uint8) != 0
    edges = np.flatnonzero(is_letter[1:] != is_letter[:-1]) + 1
    starts, lengths = edges[0::2], edges[1::2] - edges[0::2]
    if lengths.max(initial=0) > _LONGEST:
        # Longer words are cut into words of at most _LONGEST bytes.
        counts = -(-lengths // _LONGEST)
        before = np.repeat(np.cumsum(counts) - counts, counts)
        skipped = _LONGEST * (np.arange(len(before)) - before)
        starts = np.repeat(starts, counts) + skipped
        lengths = np.minimum(np.repeat(lengths, counts) - skipped, _LONGEST)
    eights = np.ndarray((len(padded) - 7,), dtype="<u8", buffer=padded, strides=(1,))
    hashes = _mixed(eights[starts] & _FIRST_BYTES[np.minimum(lengths, 8)])
    done = 8
    longer = np.flatnonzero(lengths > done)
    while len(longer):
        left = lengths[longer] - done
        next_bytes = eights[starts[longer] + done] & _FIRST_BYTES[np.minimum(left, 8)]
        hashes[longer] = _mixed(hashes[longer] ^ next_bytes)
        done += 8
        longer = longer[left > 8]
    return hashes


def _mixed(hashes: Words) -> Words:
    """Apply SplitMix64's finalizer (Steele et al. 2014), a bijection, in place."""
    hashes ^= hashes >> np.uint64(30)
    hashes *= np.uint64(0xBF58476D1CE4E5B9)
    hashes ^= hashes >> np.uint64(27)
    hashes *= np.uint64(0x94D049BB133111EB)
    hashes ^= hashes >> np.uint64(31)
    return hashes
