"""Compute the cosine of the vectors of both texts of a pair.

Shapes: R pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pretrain.encoders import unit


def cosines(
    encoder: Callable[[list[str]], Any], pairs: Sequence[Mapping[str, str]]
) -> NDArray[np.float64]:
    """Return the cosine of "text" and "pair" of each entry [R]."""
    texts = [entry[key] for key in ("text", "pair") for entry in pairs]
    both = unit(encoder(texts))
    found: NDArray[np.float64] = (both[: len(pairs)] * both[len(pairs) :]).sum(1)
    return found
