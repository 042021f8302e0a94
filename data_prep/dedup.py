"""Which documents are kept, and in which split, from hashes of their cleaned text alone."""

import hashlib
from typing import Literal

import numpy as np
import numpy.typing as npt

KEY = np.dtype([("high", "<u8"), ("low", "<u8")])


def text_hash(text: str) -> bytes:
    """The 16 bytes that stand for a text: equal texts are duplicates."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def draw(key: bytes, seed: int, purpose: Literal["fraction", "validation", "vocabulary"]) -> float:
    """A number in [0, 1) that depends on the text, the seed and the purpose only.

    Each purpose hashes again under its own name: the documents that `fraction` keeps must not be
    a biased half of the hashes that `validation` looks at.
    """
    digest = hashlib.blake2b(
        key, digest_size=8, key=seed.to_bytes(8, "little"), person=purpose.encode()
    ).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def first_of_each(keys: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Mark the first of every group of equal hashes; `keys` [n] of KEY, in document order."""
    keep = np.zeros(len(keys), dtype=bool)
    if len(keys):
        order = np.lexsort((keys["low"], keys["high"]))  # stable: equal hashes stay in order
        ordered = keys[order]
        keep[order[0]] = True
        keep[order[1:]] = ordered[1:] != ordered[:-1]
    return keep
