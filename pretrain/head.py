"""The vocabulary head with its losses, in chunks: no [positions, vocabulary] tensor ever exists.

At 64 x 512 positions and 30,522 words, student and teacher logits with their softmaxes take tens
of gigabytes; this takes one chunk's worth. Each chunk's gradient is made while its logits are
there, in the forward pass, so backward only scales what is already known.

Shapes: N positions, n positions of a chunk, D width, V vocabulary, T terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.objectives.terms import Signals, Term

CHUNK = 512  # positions; smaller ones lose the speed of large matrix products


class Projection(NamedTuple):
    """Hidden states after the MLM transform, and the output embedding that turns them to logits."""

    hidden_ND: Tensor
    weight_VD: Tensor
    bias_V: Tensor

    def logits(self, rows: slice) -> Tensor:
        """Logits [n, V] of some positions, in the weights' own or autocast's precision."""
        return F.linear(self.hidden_ND[rows], self.weight_VD, self.bias_V)


def vocabulary_losses(
    student: Projection,
    teacher: Projection | None,
    labels_N: Tensor,
    terms: Sequence[Term],
    masks_TN: Tensor,
    coefficients_T: Tensor,
) -> tuple[Tensor, Tensor]:
    """(loss [], sums [T]): loss = sum_t coefficient_t * sums_t, sums_t = sum_n mask_tn * values_tn.

    The loss carries the gradient to the student's hidden states, weight and bias; the sums carry
    none. Divide the loss by a count *after* it: the gradients are made unnormalised, which keeps
    them within fp16's range.
    """
    result: tuple[Tensor, Tensor] = _VocabularyLosses.apply(
        *student, teacher, labels_N, terms, masks_TN, coefficients_T, torch.is_grad_enabled()
    )
    return result


class _VocabularyLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor,
        teacher: Projection | None,
        labels_N: Tensor,
        terms: Sequence[Term],
        masks_TN: Tensor,
        coefficients_T: Tensor,
        grad_enabled: bool,  # in here it always reads False
    ) -> tuple[Tensor, Tensor]:
        device = hidden_ND.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else hidden_ND.dtype
        student = Projection(hidden_ND.to(dtype), weight_VD.to(dtype), bias_V.to(dtype))
        if teacher is not None:
            teacher = Projection(*(tensor.to(dtype) for tensor in teacher))

        wide = torch.float64 if dtype == torch.float64 else torch.float32
        sums_T = torch.zeros(len(terms), dtype=wide, device=hidden_ND.device)
        with_grad = grad_enabled and any(ctx.needs_input_grad)
        if with_grad:
            grad_hidden = torch.empty_like(hidden_ND)
            grad_weight = torch.zeros_like(weight_VD, dtype=wide)
            grad_bias = torch.zeros_like(bias_V, dtype=wide)

        for start in range(0, hidden_ND.shape[0], CHUNK):
            rows = slice(start, start + CHUNK)
            with torch.autocast(device, enabled=False):
                logits = student.logits(rows).requires_grad_(with_grad)
                teacher_signals = Signals() if teacher is None else Signals(teacher.logits(rows))
                with torch.set_grad_enabled(with_grad):
                    values = [
                        term.values(Signals(logits), teacher_signals, labels_N[rows])
                        for term in terms
                    ]
                    chunk_T = torch.stack(
                        [(v * mask[rows]).sum() for v, mask in zip(values, masks_TN, strict=True)]
                    )
                    chunk_loss = chunk_T @ coefficients_T.to(wide)
                sums_T += chunk_T.detach()
                if with_grad:
                    (grad_logits,) = torch.autograd.grad(chunk_loss, logits)
                    grad_hidden[rows] = grad_logits @ student.weight_VD
                    grad_weight += grad_logits.t() @ student.hidden_ND[rows]
                    grad_bias += grad_logits.sum(0, dtype=wide)

        if with_grad:
            ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
            ctx.dtypes = weight_VD.dtype, bias_V.dtype
        ctx.mark_non_differentiable(sums_T)
        return (sums_T * coefficients_T.to(wide)).sum(), sums_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        scale = grads[0]
        return (
            (grad_hidden.to(scale.dtype) * scale).to(grad_hidden.dtype),
            (grad_weight * scale).to(ctx.dtypes[0]),
            (grad_bias * scale).to(ctx.dtypes[1]),
            *[None] * 6,
        )
