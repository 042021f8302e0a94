"""Make and read masks."""

import numpy as np
from numpy.typing import NDArray

from pretrain.contracts.batch import IGNORE
from pretrain.tasks.mlm.masking import Masked, Masking

Ids = NDArray[np.int64]

PAD, UNK, CLS, SEP, MASK = range(5)

SPECIAL = (PAD, UNK, CLS, SEP, MASK)

V = 200

UNIFORM = Masking(probability=0.15, special_ids=SPECIAL, mask_id=MASK, vocab_size=V, seed=17)


def drawn_ids() -> Ids:
    """Return 512 rows of 512: documents of 3 to 200 tokens, some [UNK] and [MASK], padding."""
    draw = np.random.default_rng(0)
    rows = draw.integers(len(SPECIAL), V, (512, 512))
    for row in rows:
        end = int(draw.integers(300, 513))
        start = 0
        while start < end:
            stop = min(end, start + int(draw.integers(3, 200)))
            row[start], row[stop - 1] = CLS, SEP
            start = stop
        row[end:] = PAD
        row[draw.integers(0, end, 3)] = (UNK, UNK, MASK)
    return rows


def mask(ids: Ids, masking: Masking = UNIFORM, epoch: int = 0) -> Masked:
    return masking(ids, np.full(len(ids), epoch), np.arange(len(ids)))


def ordinary(ids: Ids) -> NDArray[np.bool_]:
    return ids >= len(SPECIAL)


def selected(result: Masked, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Return a mask [B, L] of the predicted positions."""
    flags = np.zeros(shape, bool)
    np.put_along_axis(flags, result.positions, result.labels != IGNORE, axis=1)
    return flags
