"""Build the models and rows to measure.

Weights and rows are drawn, not read: timings do not depend on the meaning of the text. Rows hold
one document each, of full length, so that padded sequences and packed rows are the same work. The
gain of packing comes on top.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DistilBertConfig,
    DistilBertForMaskedLM,
)

from pretrain.bench.sizes import Sizes
from pretrain.data.masking import Masking
from pretrain.model.distillation import MicroBatch, micro_batch

PAD, CLS, SEP, MASK = 0, 101, 102, 103
_SPECIAL = (PAD, 100, CLS, SEP, MASK)


def models(sizes: Sizes, *, dropout: float = 0.1) -> tuple[DistilBertForMaskedLM, BertForMaskedLM]:
    """Return the student in training mode and the frozen teacher, both in fp32 on the CPU."""
    width, heads = sizes.width, max(1, sizes.width // 64)
    torch.manual_seed(0)
    teacher = BertForMaskedLM(
        BertConfig(
            vocab_size=sizes.vocabulary,
            hidden_size=width,
            num_hidden_layers=sizes.layers,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            max_position_embeddings=sizes.length,
        )
    )
    student = DistilBertForMaskedLM(
        DistilBertConfig(
            vocab_size=sizes.vocabulary,
            dim=width,
            n_layers=sizes.layers // 2,
            n_heads=heads,
            hidden_dim=4 * width,
            max_position_embeddings=sizes.length,
            dropout=dropout,
            attention_dropout=dropout,
        )
    )
    spread(student), spread(teacher)
    return student.train(), teacher.eval().requires_grad_(False)


@torch.no_grad()
def spread(model: Any) -> None:
    """Scale logits to a deviation of about 2, so that a divergence is larger than its rounding."""
    weight = model.get_output_embeddings().weight
    weight.mul_(2 / (weight.std() * weight.shape[1] ** 0.5))


@cache
def masking(sizes: Sizes) -> Masking:
    """Return DistilBERT's masking."""
    return Masking(0.15, _SPECIAL, mask_id=MASK, vocab_size=sizes.vocabulary, seed=0)


def ids(sizes: Sizes, num_rows: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Return rows of one document each [B, L], int64."""
    tokens = np.random.default_rng(0).integers(MASK + 1, sizes.vocabulary, (num_rows, sizes.length))
    tokens[:, 0], tokens[:, -1] = CLS, SEP
    return tokens


def batch(sizes: Sizes, num_rows: int) -> MicroBatch:
    """Return a micro-batch of one document a row, masked, in the host's memory."""
    numbers = np.arange(num_rows)
    masked = masking(sizes)(ids(sizes, num_rows), np.zeros_like(numbers), numbers)
    rows, positions, labels = map(torch.from_numpy, masked)
    return micro_batch(rows, positions, labels, cls_id=CLS, pad_id=PAD)
