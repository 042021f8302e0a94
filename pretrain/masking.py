"""Dynamic 80/10/10 masking (BERT, section 3.1; no next-sentence prediction) by integer hashing.

The mask of a row is a pure function of (seed, epoch, row number, position): the same bits from
numpy and torch, on CPU and GPU, whatever the batch, the rank or the number of workers. Shapes are
static: every row has `num_slots` slots, and the unused ones carry the label IGNORE.

Shapes: B rows, L row length, K slots, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pretrain.hashing import derive, root

IGNORE = -100  # label of a position or slot that is not predicted, as torch's cross-entropy has it

_MASKING = 2  # names this use of the seed; order has its own
_SELECT, _ACTION, _REPLACE = range(3)
_POSITION_BITS = 12  # row lengths up to 4,096
_UNSELECTABLE = (1 << 63) - (1 << _POSITION_BITS)


class Masked(NamedTuple):
    """Corrupted rows and what is to be predicted in them."""

    input_ids: Any  # [B, L] corrupted ids
    positions: Any  # [B, K] where the slots point
    labels: Any  # [B, K] original id, or IGNORE in an unused slot


@dataclass(frozen=True)
class Masking:
    """How rows of one vocabulary are corrupted.

    Args:
        probability: share of a row's ordinary tokens that is selected (0.15 in BERT).
        special_ids: ids that are neither selected nor inserted.
        mask_id: the id of [MASK].
        vocab_size: V.
        seed: of the run.
        smoothing: None draws uniformly; an integer table [V] proportional to count**0.7 draws a
            token with weight count**-0.7, so that rare tokens are predicted more often (XLM;
            DistilBERT's training code).
        replace: "80/10/10" for training; "mask" puts [MASK] everywhere, for evaluation.
    """

    probability: float
    special_ids: tuple[int, ...]
    mask_id: int
    vocab_size: int
    seed: int
    smoothing: NDArray[np.int64] | None = None
    replace: Literal["80/10/10", "mask"] = "80/10/10"

    def num_slots(self, row_length: int) -> int:
        """K, the most tokens that can be selected in a row of `row_length`."""
        return max(1, int(self._num_wanted(np.int64(row_length))))

    def __call__(self, input_ids: Any, epochs: Any, rows: Any) -> Masked:
        """Corrupt rows `input_ids` [B, L], given each row's epoch [B] and number [B].

        All int64, and either all numpy or all torch; the result is of the same kind.
        """
        xp: Any = torch if isinstance(input_ids, torch.Tensor) else np
        like: dict[str, Any] = (
            {"device": input_ids.device} if isinstance(input_ids, torch.Tensor) else {}
        )
        length = input_ids.shape[1]
        assert length <= 1 << _POSITION_BITS
        tables = (self._special, self._ordinary, _EXPONENTIAL)
        special, ordinary, race = (xp.asarray(table, **like) for table in tables)

        # One key a row and purpose; a bijection of the row number, so no two rows share a mask.
        base = derive(root(self.seed, _MASKING), epochs)
        keys = [derive(derive(base, purpose), rows)[:, None] for purpose in range(3)]

        position = xp.arange(length, **like)[None, :]
        draw = derive(keys[_SELECT], position)
        if self.smoothing is not None:  # an exponential race: the smallest E / w win
            draw = race[draw >> 16] * xp.asarray(self.smoothing, **like)[input_ids]
        selectable = ~special[input_ids]
        draw = xp.where(selectable, (draw << _POSITION_BITS) | position, _UNSELECTABLE | position)
        slots = _smallest(draw, self.num_slots(length)) & ((1 << _POSITION_BITS) - 1)

        wanted = self._num_wanted(selectable.sum(1))
        used = xp.arange(slots.shape[1], **like)[None, :] < wanted[:, None]

        original = _take(input_ids, slots)
        replacement = self._replacements(xp, keys, slots, original, ordinary)
        corrupted = _put(input_ids, slots, xp.where(used, replacement, original))
        return Masked(corrupted, slots, xp.where(used, original, IGNORE))

    def count(self, input_ids: NDArray[np.int64]) -> int:
        """How many tokens of rows [B, L] are predicted; the same number that masking them gives."""
        return int(self._num_wanted((~self._special[input_ids]).sum(1)).sum())

    def _num_wanted(self, num_selectable: Any) -> Any:
        """round(probability * ordinary tokens) [B], but at least one where there is a token."""
        share = int(self.probability * (1 << 16) + 0.5)
        wanted = (num_selectable * share + (1 << 15)) >> 16
        return wanted + ((wanted == 0) & (num_selectable > 0))

    def _replacements(
        self, xp: Any, keys: list[Any], slots: Any, original: Any, ordinary: Any
    ) -> Any:
        if self.replace == "mask":
            return xp.full_like(original, self.mask_id)
        action = derive(keys[_ACTION], slots) % 10
        random_ids = ordinary[(derive(keys[_REPLACE], slots) * len(ordinary)) >> 32]
        return xp.where(action < 8, self.mask_id, xp.where(action == 8, original, random_ids))

    @cached_property
    def _special(self) -> NDArray[np.bool_]:
        special = np.zeros(self.vocab_size, dtype=bool)
        special[list(self.special_ids)] = True
        return special

    @cached_property
    def _ordinary(self) -> NDArray[np.int64]:
        return np.flatnonzero(~self._special)


def _integer_exponential() -> NDArray[np.int64]:
    """-ln((i + 1/2) / 2**16) in units of 2**-22, for i below 2**16, by integer arithmetic alone.

    log2 bit by bit: square the mantissa (31 fraction bits) and note each time it passes 2.
    """
    mantissa = 2 * np.arange(1 << 16, dtype=np.int64) + 1  # (i + 1/2) / 2**16 = mantissa / 2**17
    exponent = np.zeros_like(mantissa)
    for shift in (16, 8, 4, 2, 1):
        big = mantissa >> exponent >= 1 << shift
        exponent = exponent + np.where(big, shift, 0)
    fraction = mantissa << (30 - exponent)  # in [1, 2) with 30 fraction bits
    log2 = (exponent - 17) << 24
    for bit in range(23, -1, -1):
        fraction = (fraction * fraction) >> 30
        over = fraction >= 1 << 31
        log2 = log2 + np.where(over, 1 << bit, 0)
        fraction = np.where(over, fraction >> 1, fraction)
    ln2 = 2977044472  # round(ln(2) * 2**32)
    result: NDArray[np.int64] = np.maximum((-log2 * ln2) >> 34, 1)
    return result


_EXPONENTIAL = _integer_exponential()


def _smallest(keys: Any, count: int) -> Any:
    """The `count` smallest keys of each row, ascending; the keys of a row are distinct."""
    if isinstance(keys, torch.Tensor):
        return keys.sort(dim=1).values[:, :count]
    return np.sort(np.partition(keys, count - 1, axis=1)[:, :count], axis=1)


def _take(rows: Any, slots: Any) -> Any:
    if isinstance(rows, torch.Tensor):
        return rows.gather(1, slots)
    return np.take_along_axis(rows, slots, axis=1)


def _put(rows: Any, slots: Any, values: Any) -> Any:
    if isinstance(rows, torch.Tensor):
        return rows.scatter(1, slots, values)
    result = rows.copy()
    np.put_along_axis(result, slots, values, axis=1)
    return result
