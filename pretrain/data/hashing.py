"""Hash integers with a key: the same bits in Python, numpy and torch, on every device.

Whatever a run draws at random and must be able to repeat (row order, masks) is a pure function of
integers, computed here. Library random streams are not stable across versions, and float
logarithms differ between numpy, torch CPU and GPU; 64-bit wrap-around multiplication does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    import torch  # takes seconds, and `distil replay` checks its arguments without it

Integers = TypeVar("Integers", int, np.ndarray, "torch.Tensor")

MASK32 = 0xFFFFFFFF
_STRIDE = 0x9E3779B1  # odd, so i -> i * _STRIDE is a bijection of 32-bit integers


def mix(x: Integers) -> Integers:
    """Scramble the low 32 bits of `x` into 0..2**32-1; a bijection.

    `x` is a Python int or an array of int64 or uint32; uint32 wraps to the same bits in half
    the memory. A product may overflow int64, which does not change its low 32 bits.

    Constants: the two-round "lowbias32" multiply-xorshift (Wellons, "Prospecting for hash
    functions", 2018).
    """
    # Each round: shift, xor, multiply. The mask after a product keeps 32 bits where the type is
    # wider.
    x = x & MASK32  # a copy, so that the rest can be done in place
    x ^= x >> 16
    x *= 0x7FEB352D
    x &= MASK32
    x ^= x >> 15
    x *= 0x846CA68B
    x &= MASK32
    x ^= x >> 16
    return x


def derive(key: Integers, index: Integers) -> Integers:
    """Return the key of child `index` under `key`; children below 2**32 have different keys."""
    return mix(mix(index * _STRIDE) + key)


def root(seed: int, *names: int) -> int:
    """Return a 32-bit key from a seed of up to 64 bits and the integers that name its use."""
    # The low and the high half, because `mix` takes 32 bits.
    key = derive(derive(0, seed & MASK32), (seed >> 32) & MASK32)
    for name in names:
        key = derive(key, name)
    return key
