"""Compute the rows of an optimizer step: a pure function of (seed, step), for any number of ranks.

Position p = step * global_batch_size + i; epoch p // num_rows; row permutation(seed, epoch)[p %
num_rows]. A batch may contain the end of one epoch and the start of the next, so no row is dropped
and no row is seen twice in an epoch. The permutation needs no memory and any position is computed
in constant time, so a resumed run does not read past rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pretrain.data.hashing import derive, mix, root

_ORDER = 1  # this use of the seed; masking and dropout have other numbers
_ROUNDS = 6


def permutation(index: NDArray[np.int64], size: int, key: int) -> NDArray[np.int64]:
    """Return the image of each `index` [n] under a keyed permutation of 0..size-1.

    A balanced Feistel network permutes the next even power of two; it is applied again until the
    result is below `size` (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002): at
    most four times on average.
    """
    assert size > 0
    # Bits of each half: a balanced network needs an even number of bits.
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    keys = [derive(key, i) for i in range(_ROUNDS)]

    def once(x: NDArray[np.int64]) -> NDArray[np.int64]:
        left, right = x >> half, x & low
        for round_key in keys:
            left, right = right, left ^ (mix(right + round_key) & low)
        return (left << half) | right

    # Walk the cycle of the larger power of two until it is back below `size`.
    x = once(np.asarray(index, dtype=np.int64))
    while (outside := x >= size).any():
        x[outside] = once(x[outside])
    return x


@dataclass(frozen=True)
class Order:
    """Order `num_rows` rows in steps of `global_batch_size` (G) rows."""

    num_rows: int
    global_batch_size: int
    seed: int

    def steps_for(self, epochs: float) -> int:
        """Return the number of optimizer steps of `epochs` passes over the rows, rounded up."""
        return max(1, -(-round(self.num_rows * epochs) // self.global_batch_size))

    def at(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (epochs [G], rows [G]) of optimizer step `step`, counted from 0."""
        position = step * self.global_batch_size + np.arange(self.global_batch_size, dtype=np.int64)
        epochs, offsets = np.divmod(position, self.num_rows)
        rows = np.empty_like(offsets)
        for epoch in np.unique(epochs):  # more than one where the step spans an epoch's end
            here = epochs == epoch
            key = root(self.seed, _ORDER, int(epoch))
            rows[here] = permutation(offsets[here], self.num_rows, key)
        return epochs, rows
