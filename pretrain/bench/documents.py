"""Draw documents of given lengths: one a sequence with padding, or packed into rows.

The lengths are drawn from log-normal distributions whose fill of 512-token sequences is that of
Wikipedia: 0.92 with an article a sequence (cut into pieces of 512), 0.15 with a paragraph.

Shapes: B rows or sequences, L length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pretrain.data.masking import Masking
from pretrain.model.distillation import MicroBatch, micro_batch

Document = NDArray[np.int64]


class Layout(NamedTuple):
    """Describe the lengths of documents in tokens, [CLS] and [SEP] included."""

    what: str
    median: float  # of a log-normal distribution
    sigma: float  # of its logarithm

    def lengths(self, num: int, length: int, seed: int) -> list[int]:
        """Return the lengths, at most `length`, of the pieces of `num` documents."""
        draw = np.random.default_rng(seed)
        whole = draw.lognormal(np.log(self.median), self.sigma, num).round().astype(int)
        pieces: list[int] = []
        for n in whole.clip(3):
            full, rest = divmod(int(n), length)
            pieces += [length] * full + [rest] * (rest >= 3)
        return pieces


LAYOUTS = {
    "article": Layout("an article a sequence, cut into pieces", 1900, 1.0),
    "paragraph": Layout("a paragraph a sequence", 60, 0.7),
}


class SpecialIds(NamedTuple):
    """Hold the special ids of a vocabulary."""

    pad: int
    cls: int
    sep: int


def drawn(lengths: Sequence[int], vocabulary: int, special: SpecialIds) -> list[Document]:
    """Draw documents: [CLS], random tokens from id 104 on, [SEP]."""
    draw = np.random.default_rng(0)
    documents = []
    for n in lengths:
        ids = draw.integers(104, vocabulary, n)
        # Some vocabularies have padding at their end, among the drawn ids.
        ids[ids == special.pad] = 104
        ids[0], ids[-1] = special.cls, special.sep
        documents.append(ids)
    return documents


def packed(documents: Sequence[Document], num_rows: int, length: int) -> list[list[Document]]:
    """Pack documents into rows: each goes into the first row with room for it, if any."""
    rows: list[list[Document]] = [[] for _ in range(num_rows)]
    room = [length] * num_rows
    for document in documents:
        row = next((i for i, left in enumerate(room) if left >= len(document)), None)
        if row is not None:
            rows[row].append(document)
            room[row] -= len(document)
    return rows


def typical(documents: Sequence[Document], num_rows: int) -> list[list[Document]]:
    """Return neighbours, one a row, whose mean length is nearest to the overall mean."""
    lengths = np.array([len(document) for document in documents])
    sums = np.convolve(lengths, np.ones(num_rows), "valid")
    first = int(np.abs(sums / num_rows - lengths.mean()).argmin())
    return [[document] for document in documents[first : first + num_rows]]


def batch(
    rows: Sequence[Sequence[Document]], length: int, masking: Masking, special: SpecialIds
) -> MicroBatch:
    """Return a micro-batch of rows of documents, padded to `length` and masked."""
    ids = np.full((len(rows), length), special.pad, dtype=np.int64)
    for row, documents in zip(ids, rows, strict=True):
        joined = np.concatenate(documents)
        row[: len(joined)] = joined
    numbers: Any = np.arange(len(rows))
    masked = masking(ids, np.zeros_like(numbers), numbers)
    tokens, positions, labels = map(torch.from_numpy, masked)
    return micro_batch(tokens, positions, labels, cls_id=special.cls, pad_id=special.pad)
