"""Find equal and nearly equal texts: hashes on disk, pairs found in slices of the hash space.

An *item* is a document or a paragraph. Each unit of extraction saves its items' hashes in order,
so that a slice of the hash space is a slice of each file: memory does not grow with the corpus.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from data_prep.duplicates import minhash

Pairs = npt.NDArray[np.int64]  # [n, 2], item numbers over the whole corpus, the smaller first
HASH = np.dtype([("high", "<u8"), ("low", "<u8"), ("item", "<u4")])
CHUNK = 2**16  # items, half a kilobyte of signature each
SIGNATURE_CHARACTERS = 2**22  # characters whose signatures are computed together
PAIRS_AT_ONCE = 2**16  # a kilobyte of signatures each


def text_hash(text: str) -> bytes:
    """Return a text's 16 bytes of hash: equal texts are duplicates."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def draw(key: bytes, seed: int, purpose: Literal["fraction", "validation", "vocabulary"]) -> float:
    """Return a number in [0, 1) that depends on the text, the seed and the purpose only.

    Each purpose hashes again under its own name: the documents that `fraction` keeps must not be
    a biased half of the hashes that `validation` looks at.
    """
    digest = hashlib.blake2b(
        key, digest_size=8, key=seed.to_bytes(8, "little"), person=purpose.encode()
    ).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


class Items:
    """Write the hashes of one unit's items, in the order they are added.

    `least` is the number of words from which on near duplicates are looked for; None: not at all.
    For every CHUNK items: `LEVEL-texts-N.npy`, and for near duplicates -bands-N.npy and
    -signatures-N.npy; for paragraphs -places-N.npy, (document, line) of each [n, 2].
    """

    def __init__(self, folder: Path, level: str, least: int | None) -> None:
        self._stem = str(folder / level)
        self._least = least
        self._chunk = 0
        self._keys: list[bytes] = []
        self._places: list[tuple[int, int]] = []
        self._texts: list[str] = []  # whose signatures are not computed yet
        self._size = 0
        self._signatures: list[npt.NDArray[np.uint32]] = []
        self._usable: list[npt.NDArray[np.bool_]] = []

    def add(self, key: bytes, text: str, place: tuple[int, int] | None = None) -> None:
        """Add an item: its text's hash, the text for its signature, and where it stands."""
        self._keys.append(key)
        if place is not None:
            self._places.append(place)
        if self._least is not None:
            self._texts.append(text)
            self._size += len(text)
            if self._size >= SIGNATURE_CHARACTERS:
                self._sign()
        if len(self._keys) == CHUNK:
            self.save()

    def _sign(self) -> None:
        assert self._least is not None
        signatures, usable = minhash.signatures(self._texts, self._least)
        self._signatures.append(signatures)
        self._usable.append(usable)
        self._texts, self._size = [], 0

    def save(self) -> None:
        """Write the items added since the last call."""
        if not self._keys:
            return
        first = self._chunk * CHUNK
        halves = np.frombuffer(b"".join(self._keys), dtype="<u8").reshape(-1, 2)
        texts = np.empty(len(halves), dtype=HASH)
        texts["high"], texts["low"] = halves[:, 0], halves[:, 1]
        texts["item"] = np.arange(first, first + len(halves))
        arrays: dict[str, npt.NDArray[Any]] = {"texts": np.sort(texts, order=HASH.names)}
        if self._places:
            arrays["places"] = np.array(self._places, dtype=np.uint32)
        if self._least is not None:
            self._sign()
            signatures = np.concatenate(self._signatures)
            items = np.flatnonzero(np.concatenate(self._usable))
            hashes = minhash.bands(signatures[items])
            bands = np.zeros(hashes.size, dtype=HASH)
            bands["high"] = hashes.reshape(-1)
            bands["item"] = np.repeat(items + first, hashes.shape[1])
            arrays |= {"bands": np.sort(bands, order=HASH.names), "signatures": signatures}
        for kind, values in arrays.items():
            np.save(f"{self._stem}-{kind}-{self._chunk:05d}.npy", values)
        self._keys, self._places, self._signatures, self._usable = [], [], [], []
        self._chunk += 1


def chunk_files(folder: Path, name: str, items: int) -> list[Path]:
    """Name the files, such as documents-texts, that a unit with so many items wrote, in order.

    The names follow from the unit's record. A search of the folder would take a file that this
    machine cannot see for one that was never written.
    """
    return [folder / f"{name}-{number:05d}.npy" for number in range(-(-items // CHUNK))]


def pairs(
    folders: Sequence[Path], bounds: Sequence[int], name: str, slice_number: int, slices: int
) -> Pairs:
    """Return pairs of items with equal hashes in one slice, each item with its group's first.

    `folders` are the units' in order, `bounds` the number of the first item of each and of all
    items; `name` is the file's, such as documents-texts.
    """
    low = slice_number * 2**64 // slices
    high = (slice_number + 1) * 2**64 // slices
    found = [np.empty((0, 2), dtype="<u8")]
    items = [np.empty(0, dtype=np.int64)]
    for folder, (start, end_of_unit) in zip(folders, pairwise(bounds), strict=True):
        for file in chunk_files(folder, name, end_of_unit - start):
            hashes = np.load(file, mmap_mode="r")
            first = np.searchsorted(hashes["high"], np.uint64(low))
            end = hashes["high"].searchsorted(np.uint64(high)) if high < 2**64 else len(hashes)
            mine = np.array(hashes[first : int(end)])
            found.append(np.stack([mine["high"], mine["low"]], axis=1))
            items.append(mine["item"].astype(np.int64) + start)
    keys, numbers = np.concatenate(found), np.concatenate(items)
    order = np.lexsort((numbers, keys[:, 1], keys[:, 0]))
    keys, numbers = keys[order], numbers[order]
    begins = np.ones(len(keys), dtype=bool)
    begins[1:] = (keys[1:] != keys[:-1]).any(axis=1)
    firsts = numbers[np.flatnonzero(begins)[np.cumsum(begins) - 1]] if len(keys) else numbers
    # A text can have the same hash in two bands' worth of shingles: no pair with itself.
    other = firsts != numbers
    return np.stack([firsts[other], numbers[other]], axis=1)


def similar(
    folders: Sequence[Path], bounds: Sequence[int], level: str, found: Pairs, threshold: float
) -> Pairs:
    """Return the candidate pairs whose signatures estimate a Jaccard of at least `threshold`."""
    found = np.unique(found, axis=0)
    starts = np.asarray(bounds[:-1], dtype=np.int64)
    kept = [np.empty((0, 2), dtype=np.int64)]
    for start in range(0, len(found), PAIRS_AT_ONCE):
        some = found[start : start + PAIRS_AT_ONCE]
        unit_of = np.searchsorted(starts, some, side="right") - 1
        chunk_of, row_of = np.divmod(some - starts[unit_of], CHUNK)
        signatures = np.empty((*some.shape, minhash.NUM_PERMUTATIONS), dtype=np.uint32)
        # Each file is opened once, for both items of all pairs.
        for unit, chunk in set(zip(unit_of.flat, chunk_of.flat, strict=True)):
            file = folders[unit] / f"{level}-signatures-{chunk:05d}.npy"
            here = (unit_of == unit) & (chunk_of == chunk)
            signatures[here] = np.load(file, mmap_mode="r")[row_of[here]]
        estimates = minhash.similarity(signatures[:, 0], signatures[:, 1])
        kept.append(some[estimates >= threshold])
    return np.concatenate(kept)


def clusters(found: Pairs) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return (items, cluster of each) of all items in a pair; clusters are connected components.

    A cluster's number is its smallest item. Memory goes with the pairs, not with the corpus.
    """
    items, ends = np.unique(found, return_inverse=True)
    ends = ends.reshape(-1, 2)
    labels = np.arange(len(items))
    while True:
        low = np.minimum(labels[ends[:, 0]], labels[ends[:, 1]])
        lower = labels.copy()
        for side in (0, 1):
            np.minimum.at(lower, ends[:, side], low)
            np.minimum.at(lower, labels[ends[:, side]], low)  # the root follows: few rounds
        lower = lower[lower]
        if np.array_equal(lower, labels):
            return items, items[labels]
        labels = lower
