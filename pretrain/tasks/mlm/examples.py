"""Mask the rows of a step, and build the micro-batches of masked rows.

Shapes: R rows, L row length, K mask slots a row.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data_prep.shards import Manifest, ShardSet, read_listed
from data_prep.shards.manifest import TOKEN_COUNTS
from pretrain import RunError
from pretrain.config import MaskingConfig
from pretrain.contracts.batch import IGNORE, Batch, Rows, packed_batch
from pretrain.tasks.mlm.masking import Masking
from pretrain.tasks.mlm.words import Borders, borders
from pretrain.tasks.task import Examples

_KEY = 0x4556414C  # "EVAL"


class MaskedRows(Examples):
    """Mask rows of a split.

    The labels are "positions" [R, K], where the mask slots point, and "masked" [R, K], the original
    ids there, or IGNORE in an unused slot.
    """

    def __init__(self, shards: ShardSet, masking: Masking) -> None:
        super().__init__(shards)
        self.masking = masking

    def rows(self, ids: Any, epochs: Any, numbers: Any, step: int = 0, skipped: Any = None) -> Rows:
        """Mask rows by their epochs, their numbers and the step.

        The host makes the masks, not the GPU: one core masks tens of millions of tokens a second,
        ahead of the step that needs them, and no GPU trains on two million a second.
        """
        if skipped is not None:
            ids[skipped] = self.special.pad  # which is special, so masking selects nothing there
        found = self.masking(ids, epochs, numbers, step)
        return {
            "input_ids": torch.from_numpy(found.input_ids),
            "positions": torch.from_numpy(found.positions.astype(np.int16)),
            "masked": torch.from_numpy(found.labels.astype(np.int32)),
        }

    def batch(self, rows: Rows) -> Batch:
        """Return a micro-batch with the count "masked"."""
        return masked_batch(
            *(rows[name] for name in ("input_ids", "positions", "masked")),
            cls_id=self.special.cls,
            pad_id=self.special.pad,
        )

    def fullest(self, ids: Any, numbers: Any, token: int) -> Batch:
        """Return a micro-batch with every mask slot used."""
        slots = self.masking.num_slots(ids.shape[1])
        positions = torch.arange(slots).repeat(len(ids), 1)  # a view of one row cannot be pinned
        labels = torch.full_like(positions, token)
        rows = {"input_ids": torch.from_numpy(ids), "positions": positions, "masked": labels}
        return self.batch(rows)


def masked_batch(
    input_ids: Tensor, positions: Tensor, labels: Tensor, *, cls_id: int, pad_id: int
) -> Batch:
    """Return a micro-batch of masked rows; see `MaskedRows` and `packed_batch`."""
    counts = {"masked": int(np.count_nonzero(labels.numpy() != IGNORE))}
    both = {"positions": positions, "masked": labels}
    return packed_batch(input_ids, both, counts, cls_id=cls_id, pad_id=pad_id)


def build_masking(
    config: MaskingConfig, folder: Path, manifest: Manifest, seed: int, num_steps: int = 1
) -> Masking:
    """Return the masking of a training run of `num_steps`, over the shards' vocabulary.

    Raises:
        CorpusError: a file of the shards is damaged.
        RunError: mode whole_word, and the tokenizer does not mark where words begin.
    """
    smoothing, words = None, None
    if config.mode == "smoothed":
        table = json.loads(read_listed(folder, manifest, TOKEN_COUNTS))
        smoothing = np.asarray(table["smoothing"], dtype=np.int64)
    if config.mode == "whole_word":
        words = words_of(folder, manifest, f"masking.mode {config.mode}", "take mode uniform")
    first, final = config.ends
    return replace(
        masking_over(manifest, first, seed),
        smoothing=smoothing,
        final=final,
        num_steps=num_steps,
        words=words,
    )


def words_of(folder: Path, manifest: Manifest, key: str, fix: str) -> Borders:
    """Return the borders of words in the shards' rows.

    Raises:
        CorpusError: the tokenizer of the shards is damaged.
        RunError: the rows have no words; names the key and the fix.
    """
    data = read_listed(folder, manifest, "tokenizer/tokenizer.json")
    try:
        found = borders(data)
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{key}: {folder} holds no words: {error}; {fix}") from None
    # Tokens that were added to the vocabulary later are words.
    later = max(0, manifest.tokenizer.vocab_size - len(found.goes_on))
    return Borders(*(np.pad(marks, (0, later)) for marks in found))


def special_tokens(manifest: Manifest, size: int) -> NDArray[np.bool_]:
    """Return which of the first `size` ids are special."""
    found = np.zeros(size, dtype=bool)
    found[[*special_ids(manifest)]] = True
    return found


def masking_over(manifest: Manifest, probability: float, seed: int) -> Masking:
    """Return uniform masking over the shards' vocabulary."""
    return Masking(
        probability=probability,
        special_ids=special_ids(manifest),
        mask_id=manifest.tokenizer.special_ids.mask,
        vocab_size=manifest.tokenizer.vocab_size,
        seed=seed,
    )


def special_ids(manifest: Manifest) -> tuple[int, ...]:
    """Return the ids that masking never selects or inserts: [PAD], [UNK], [CLS], [SEP], [MASK]."""
    special = manifest.tokenizer.special_ids
    return special.pad, special.unk, special.cls, special.sep, special.mask


def evaluation_masking(manifest: Manifest, probability: float) -> Masking:
    """Return the fixed masks of evaluation: uniform, all [MASK], the same for every run."""
    return replace(masking_over(manifest, probability, _KEY), replace="mask")
