"""Count a micro-step, or its LM head, by shapes."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from pretrain.bench.footprint import Counter, Footprint, shapes_only
from pretrain.contracts.batch import Batch
from pretrain.kernels.head import vocabulary_losses
from pretrain.model.distillation import Distillation
from pretrain.model.families import family_of


def of_micro_step(
    module: Distillation,
    batch_size: int,
    row_length: int,
    *,
    autocast: torch.dtype | None = None,
    segments: int = 1,
    masked: float = 0.15,
    device: str = "cpu",
) -> Footprint:
    """Count the forward and backward pass of one micro-batch without padding.

    The peak includes the batch and the gradients of all parameters, but not the weights.

    Args:
        module: the module to train, on any device; it is not changed.
        batch_size, row_length: rows, and tokens of each.
        autocast: the half precision, or None.
        segments: documents of a row, all of the same length.
        masked: the share of tokens that is predicted.
        device: where it would run, "cpu" or "cuda"; see `shapes_only`.
    """
    B, L, K = batch_size, row_length, max(1, round(masked * row_length))
    begins = [row * L + i * L // segments for row in range(B) for i in range(segments)]
    cu_seqlens = torch.tensor([*begins, B * L], dtype=torch.int32)
    longest = int(cu_seqlens.diff().max())
    pairs = B * L * L // segments
    counts: dict[str, int] = {"tokens": B * L, "masked": B * K}
    counts |= {"sequences": B * segments, "pairs": pairs}
    with shapes_only(module, device) as shapes, Counter() as counter:
        ids = torch.zeros(B, L, dtype=torch.int64, device=device)
        slots = torch.zeros(B, K, dtype=torch.int64, device=device)
        labels = {"positions": slots, "masked": slots.clone()}
        documents = np.stack([begins, cu_seqlens.diff().numpy()], axis=1)
        batch = Batch(ids, cu_seqlens, longest, labels, counts, documents)
        with torch.autocast(device, autocast, enabled=autocast is not None):
            loss, _ = shapes(batch, torch.ones(len(shapes.terms), device=device))
        (loss * (1 / batch.counts["tokens"])).backward()
    return counter.footprint


def of_head(
    module: Distillation,
    batch_size: int,
    row_length: int,
    *,
    autocast: torch.dtype | None = None,
    masked: float = 0.15,
    device: str = "cpu",
) -> Footprint:
    """Count the LM head and its losses alone: what a step needs above its encoders.

    The arguments are those of `of_micro_step`. The peak includes the gradients of the student's
    inputs (hidden states and embeddings), but not the inputs themselves.
    """
    tokens, slots = batch_size * row_length, batch_size * max(1, round(masked * row_length))
    terms = module.vocabulary_terms
    rows = tokens if any(term.over == "tokens" for term in terms) else slots
    with shapes_only(module, device) as shapes:
        cast = partial(torch.autocast, device, autocast, enabled=autocast is not None)
        with torch.no_grad(), cast():
            needs_teacher = any(term.needs_teacher for term in terms)
            heads = []  # the head's inputs, as the models hand them over
            for model in (shapes.student, shapes.teacher if needs_teacher else None):
                if model is not None:
                    size = rows, model.config.hidden_size
                    hidden = torch.zeros(size, dtype=model.dtype, device=device)
                    heads.append(family_of(model).projection(model, hidden))
        student, teacher = heads[0], heads[1] if len(heads) > 1 else None
        student.hidden_ND.requires_grad_()
        labels = torch.zeros(slots, dtype=torch.int64, device=device)
        inputs = student, teacher, labels, terms, torch.ones(len(terms), device=device)
        with Counter() as counter:
            with cast():
                loss, _ = vocabulary_losses(*inputs, backend=shapes.backend)
            (loss * (1 / tokens)).backward()
    return counter.footprint
