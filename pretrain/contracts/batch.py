"""Define what terms read of a micro-batch besides the outputs of both encoders.

Shapes: R rows, L row length, K the most whole documents of a row, W width of a sentence vector.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from pretrain.contracts.packing import Packing


class Sequences(NamedTuple):
    """Hold the whole documents of some rows, the first ones of each row's K places."""

    # Narrow integers from a loader's worker, and on the device as they come.
    documents: Tensor  # [R, L] place of each token's whole document in its row; -1: in none
    lengths: Tensor  # [R, K] tokens, [CLS] and [SEP] included; 0 at an unused place
    vectors: Tensor | None = None  # [R, K, W] of the teacher; None: it computes them

    def split(self, size: int) -> Iterator[Sequences]:
        """Yield `size` rows at a time."""
        for first in range(0, len(self.documents), size):
            rows = slice(first, first + size)
            vectors = None if self.vectors is None else self.vectors[rows]
            yield Sequences(self.documents[rows], self.lengths[rows], vectors)


class Batch(NamedTuple):
    """Hold what a `SignalTerm` reads of a micro-batch besides the outputs of both encoders."""

    packing: Packing  # documents and padding
    sequences: Sequences | None = None  # whole documents, of objectives that compare their vectors
