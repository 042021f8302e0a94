"""Mask tokens dynamically, 80/10/10 (BERT, section 3.1; no next-sentence prediction), by hashing.

The mask of a row is a pure function of (seed, epoch, row number, position): the same bits for every
batch size, rank and number of workers. Shapes are static: every row has `num_slots` slots, and an
unused slot has the label IGNORE.

Shapes: B rows, L row length, K slots, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pretrain.contracts.batch import IGNORE
from pretrain.data.hashing import derive, root
from pretrain.tasks.mlm.words import Borders, choose_words, draw_words

_MASKING = 2  # this use of the seed; order and dropout have other numbers
_SELECT, _ACTION, _REPLACE = range(3)
_POSITION_BITS = 12  # row lengths up to 4,096
_POSITION = (1 << _POSITION_BITS) - 1
_UNSELECTABLE = (1 << 63) - (1 << _POSITION_BITS)
_AFTER_WORDS = 1 << 33  # above every draw of a word
_BLOCK_TOKENS = 1 << 15  # so that numpy's temporaries stay in the processor's cache


class Masked(NamedTuple):
    """Hold corrupted rows and their labels: numpy arrays, or tensors once they are a batch."""

    input_ids: Any  # [B, L] corrupted ids
    positions: Any  # [B, K] where the slots point
    labels: Any  # [B, K] original id, or IGNORE in an unused slot


@dataclass(frozen=True)
class Masking:
    """Mask rows of token ids; call it with the rows, their epochs and their numbers.

    Args:
        probability: share of a row's ordinary tokens that is selected (0.15 in BERT).
        final: the share at the last of `num_steps` steps; in between it changes linearly.
        special_ids: ids that are neither selected nor inserted.
        mask_id: the id of [MASK].
        vocab_size: V.
        seed: of the run.
        smoothing: None draws uniformly; for frequency-weighted masking, an integer table [V]
            proportional to count**0.7: a token is drawn with weight count**-0.7, so rare tokens are
            predicted more often (XLM; DistilBERT's training code).
        words: the borders of words, to draw whole words; None draws single tokens.
        replace: "80/10/10" for training; "mask" puts [MASK] everywhere, for evaluation.
    """

    probability: float
    special_ids: tuple[int, ...]
    mask_id: int
    vocab_size: int
    seed: int
    smoothing: NDArray[np.int64] | None = None
    final: float | None = None
    num_steps: int = 1
    words: Borders | None = None
    replace: Literal["80/10/10", "mask"] = "80/10/10"

    def num_slots(self, row_length: int) -> int:
        """Return K, the most tokens that can be selected in a row of `row_length`."""
        shares = (self._share(0), self._share(self.num_steps - 1))
        return max(1, int(_num_wanted(np.int64(row_length), max(shares))))

    def __call__(
        self, input_ids: NDArray[Any], epochs: NDArray[Any], rows: NDArray[Any], step: int = 0
    ) -> Masked:
        """Corrupt rows `input_ids` [B, L], given each row's epoch [B] and number [B], and the step.

        The result is int64, except for its `input_ids`: they keep their type, which in the shards
        takes a quarter of the memory.
        """
        num_rows, length = input_ids.shape
        assert length <= 1 << _POSITION_BITS
        # `keys` [3, B, 1]: one 32-bit key for each purpose (selection, action, replacement) and
        # row. It is a bijection of the row number, so no two rows of an epoch share a mask.
        numbers: list[Any] = [np.asarray(x, dtype=np.uint32) for x in (epochs, np.arange(3), rows)]
        epoch, purpose, number = numbers  # uint32, in which `mix` is fast
        base = derive(root(self.seed, _MASKING), epoch)
        keys = derive(derive(base, purpose[:, None]), number)[:, :, None]

        slots = (num_rows, self.num_slots(length))
        # The result is allocated once, and each block of rows writes into its part.
        result = Masked(
            np.empty(input_ids.shape, dtype=input_ids.dtype),
            *(np.empty(slots, dtype=np.int64) for _ in range(2)),
        )
        size = max(1, _BLOCK_TOKENS // length)
        for start in range(0, num_rows, size):
            block = slice(start, start + size)
            result.input_ids[block] = input_ids[block]
            ids = np.asarray(input_ids[block], dtype=np.int64)  # the fastest index into tables
            parts = Masked(*(values[block] for values in result))
            self._corrupt(ids, parts, keys[:, block], self._share(step))
        return result

    def _corrupt(
        self, ids: NDArray[np.int64], rows: Masked, keys: NDArray[Any], share: int
    ) -> None:
        """Select tokens and replace them, 80/10/10; fill in positions and labels.

        Args:
            ids: [B, L] int64.
            rows: the result, written in place; its `input_ids` begin as a copy of `ids`.
            keys: [3, B, 1], a key of each row for each purpose.
            share: of a row's ordinary tokens to select, in units of 2**-16.
        """
        num_rows, length = ids.shape
        num_slots = rows.positions.shape[1]

        # Selection: one 32-bit draw per position [B, L]. The tokens with the smallest draws are
        # selected, which is sampling without replacement.
        draw = derive(keys[_SELECT], np.arange(length, dtype=keys.dtype))
        if self.smoothing is not None:
            # Weighted sampling without replacement: the smallest E / w, with E exponential.
            # `chance` here is the upper 16 bits of the draw, an index into the table of exponential
            # variates. The table of weights holds 1 / w up to a factor, so the product is E / w.
            chance = np.asarray(draw >> 16, dtype=np.int64)
            draw = _EXPONENTIAL[chance] * self.smoothing[ids]  # int64
        drawn = None
        if self.words is not None:
            drawn = draw_words(draw, ids, self.words, self._special)
        # Padding, [CLS], [SEP] and the like are special, so no slot points at them while ordinary
        # tokens are left.
        selectable = ~self._special[ids]
        # A row with fewer ordinary tokens uses fewer slots. The shape stays the same.
        wanted = _num_wanted(selectable.sum(1), share)
        if drawn is not None:
            chosen = choose_words(drawn, selectable, wanted)
            wanted = chosen.sum(1)
            draw = np.where(chosen, drawn.draw, _AFTER_WORDS)  # then the chosen come first
        slots = first_slots(draw, selectable, num_slots)
        used = np.arange(num_slots) < wanted[:, None]

        # One flat index per slot.
        flat = slots + np.arange(0, num_rows * length, length)[:, None]
        original = ids.reshape(-1)[flat]
        # What stands at the selected positions, 80/10/10: [MASK], the original token, or a random
        # one.
        if self.replace == "mask":
            replacement = np.full_like(original, self.mask_id)
        else:
            # Two more 32-bit draws per slot [B, K], with keys of their own, so they are independent
            # of the selection: `action` chooses among the three cases, `number` the random token.
            action, number = (
                derive(keys[purpose], np.asarray(slots, dtype=keys.dtype))
                for purpose in (_ACTION, _REPLACE)
            )
            action %= 10  # 0 to 7: [MASK]; 8: the original token; 9: a random ordinary token
            # number * n / 2**32 without a division; special tokens are never drawn.
            ordinary = np.flatnonzero(~self._special)
            random_ids = ordinary[(np.asarray(number, dtype=np.int64) * len(ordinary)) >> 32]
            kept = np.where(action == 8, original, random_ids)
            replacement = np.where(action < 8, self.mask_id, kept)
        # Unused slots write the original token back, so shapes stay static.
        rows.input_ids.reshape(-1)[flat] = np.where(used, replacement, original)
        rows.positions[:] = slots
        rows.labels[:] = np.where(used, original, IGNORE)

    def _share(self, step: int) -> int:
        """Return the share of ordinary tokens to select at a step, in units of 2**-16."""
        # The first and the last step have exactly the two shares of the config.
        probability = self.probability
        if self.final is not None:
            probability += (self.final - probability) * step / max(1, self.num_steps - 1)
        return int(probability * (1 << 16) + 0.5)

    @cached_property
    def _special(self) -> NDArray[np.bool_]:
        special = np.zeros(self.vocab_size, dtype=bool)
        special[list(self.special_ids)] = True
        return special


def _num_wanted(num_selectable: Any, share: int) -> Any:
    """Return round(share * ordinary tokens) [B]; at least 1 of some tokens, unless share is 0."""
    # Integer arithmetic, rounded to nearest, so that every machine agrees to the bit.
    wanted = (num_selectable * share + (1 << 15)) >> 16
    return wanted + ((wanted == 0) & (num_selectable > 0) & (share > 0))


def integer_exponential() -> NDArray[np.int32]:
    """Return -ln((i + 1/2) / 2**16) in units of 2**-22 for every i below 2**16.

    Only integer arithmetic: float logarithms differ between libraries. It computes log2 bit by bit:
    square the mantissa (30 fraction bits); the bit is 1 if the square reaches 2.
    """
    mantissa = 2 * np.arange(1 << 16, dtype=np.int64) + 1  # (i + 1/2) / 2**16 = mantissa / 2**17
    exponent = np.zeros_like(mantissa)
    # The exponent, floor(log2(mantissa)), by binary search.
    for shift in (16, 8, 4, 2, 1):
        big = mantissa >> exponent >= 1 << shift
        exponent = exponent + np.where(big, shift, 0)
    # Then 24 fraction bits of log2.
    fraction = mantissa << (30 - exponent)  # in [1, 2) with 30 fraction bits
    log2 = (exponent - 17) << 24
    for bit in range(23, -1, -1):
        fraction = (fraction * fraction) >> 30
        over = fraction >= 1 << 31
        log2 = log2 + np.where(over, 1 << bit, 0)
        fraction = np.where(over, fraction >> 1, fraction)
    ln2 = 2977044472  # round(ln(2) * 2**32)
    return np.maximum((-log2 * ln2) >> 34, 1).astype(np.int32)  # int64 would take twice the cache


_EXPONENTIAL = integer_exponential()


def first_slots(draw: NDArray[Any], selectable: NDArray[np.bool_], count: int) -> NDArray[np.int64]:
    """Return the positions of the `count` smallest draws of each row [B, count], ascending.

    Of equal draws the first position wins. Positions that are not selectable come last.
    """
    # The position goes into the low bits: it breaks ties, and one sort gives both order and places.
    # A draw is below 2**51, so draw and 12 position bits fit into int64.
    position = np.arange(draw.shape[1])
    keys = (draw.astype(np.int64) << _POSITION_BITS) | position
    keys = np.where(selectable, keys, _UNSELECTABLE | position)
    keys.sort(axis=1)
    return keys[:, :count] & _POSITION
