"""Compute losses and gradients from hidden states, in chunks of positions.

It computes exactly the vocabulary terms of `vocabulary_terms.py`, and runs in every training step
and evaluation.

At 64 x 512 positions and 30,522 tokens of vocabulary, student and teacher logits with their
softmaxes take tens of gigabytes. Here only one chunk of them exists. Each chunk's gradient is
computed with its logits, in the forward pass, so the backward pass only scales it.

Shapes: N positions, M of them with a label, n positions of a chunk, D width, V vocabulary (P of it
and padding), T terms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.contracts.terms import VocabularyTerm
from pretrain.kernels.cpu_layers import have_product, product
from pretrain.kernels.head import closed_form
from pretrain.kernels.head.closed_form import Values, Weights
from pretrain.kernels.triton_support import use_triton

# Positions at a time: smaller chunks would be slower matrix products.
CHUNK = {"cpu": 512}
CHUNK_GPU = 2048
# Tokens at a time in a product of half precision, 13 MB of BERT-base's 47; on a GPU all, in one
# kernel.
WORDS = {"cpu": 8192}
# On a GPU weights, bias and logits are padded with zeros to such a multiple:
# tensor cores take 16 bytes at a time also along the vocabulary, and BERT's has 30,522 tokens.
_MULTIPLE = 64

# Whether this torch (2.8 and later) has products of half precision on GPUs with sums in fp32.
_SUMS_IN_FP32 = "dtype_out" in torch.ops.aten.addmm.overloads()

Backend = Literal["auto", "torch", "triton"]


class Projection(NamedTuple):
    """Hold hidden states after the MLM transform, and weight and bias of the LM head."""

    hidden_ND: Tensor
    weight_VD: Tensor
    bias_V: Tensor

    def first(self, num_tokens: int | None) -> Projection:
        """Leave out the logits of embeddings that pad a vocabulary; None leaves out none."""
        if num_tokens is None or num_tokens == len(self.weight_VD):
            return self
        return Projection(self.hidden_ND, self.weight_VD[:num_tokens], self.bias_V[:num_tokens])

    def cast(self, dtype: torch.dtype) -> Projection:
        """Return copies in this dtype, padded along the vocabulary where that is faster."""
        hidden, weight, bias = (tensor.to(dtype) for tensor in self)
        missing = -len(weight) % _MULTIPLE
        if hidden.is_cuda and missing:
            weight, bias = F.pad(weight, (0, 0, 0, missing)), F.pad(bias, (0, missing))
        return Projection(hidden, weight, bias)

    def logits(self, rows: slice, tile_nV: Tensor | None) -> Tensor:
        """Return logits [n, V] of some positions, in the first rows of a tile if there is one."""
        hidden = self.hidden_ND[rows]
        if tile_nV is None:
            by_onednn = have_product("head", hidden, self.weight_VD, self.bias_V)
            return (product if by_onednn else F.linear)(hidden, self.weight_VD, self.bias_V)
        out = tile_nV[: hidden.shape[0]]
        return torch.addmm(self.bias_V, hidden, self.weight_VD.t(), out=out)


def vocabulary_losses(
    student: Projection,
    teacher: Projection | None,
    labels_M: Tensor,
    terms: Sequence[VocabularyTerm],
    factors_T: Tensor,
    *,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Return (loss [], sums [T]): loss = sum_t factor_t * sums_t, sums_t = sum_n values_tn.

    The loss has the gradient to the student's hidden states, weight and bias; the sums have none.
    Divide the returned loss by a count: the gradients are computed unnormalised, which keeps them
    within fp16's range. All precisions add up in fp32 at least.

    Args:
        student: of N positions, those with a label first.
        teacher: of the same positions, if a term needs it.
        labels_M: of the first M positions, -100 for none; the other positions have no label, and
            no cross-entropy is computed there.
        terms: over all N positions ("tokens") or the first M ("masked"). One KL and one
            cross-entropy at most are computed by `backend`; with other terms, all by autograd.
        factors_T: the factor of each term's sum.
        backend: "auto" is Triton where `use_triton` allows it, else plain torch.
    """
    result: tuple[Tensor, Tensor] = _VocabularyLosses.apply(
        *student, teacher, labels_M, terms, factors_T, backend, torch.is_grad_enabled()
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
        labels_M: Tensor,
        terms: Sequence[VocabularyTerm],
        factors_T: Tensor,
        backend: Backend,
        grad_enabled: bool,  # within forward, torch's own flag is always False
    ) -> tuple[Tensor, Tensor]:
        # Precision: matrix products in autocast's dtype, sums in fp32 at least. Tensors are cast
        # here, once for all chunks.
        device = hidden_ND.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else hidden_ND.dtype
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        student = Projection(hidden_ND, weight_VD, bias_V).cast(dtype)
        teacher = None if teacher is None else teacher.cast(dtype)
        # Without a gradient (evaluation) only the sums are computed.
        with_grad = grad_enabled and any(ctx.needs_input_grad)
        factors_T = factors_T.to(wide)
        # Choose the code for a chunk. A backend computes at most one KL and one cross-entropy, and
        # overwrites the logits. So one term without a fused form, or two of one formula, sends all
        # terms through autograd.
        formulas = [term.fused for term in terms]
        if None in formulas or len(set(formulas)) < len(formulas):
            chunk_losses = partial(_autograd_losses, terms)
        elif use_triton(backend, student.hidden_ND):
            from pretrain.kernels.head import triton_kernel  # needs the package triton

            chunk_losses = partial(_fused_losses, triton_kernel.losses_and_gradient, terms)
        else:
            chunk_losses = partial(_fused_losses, closed_form.losses_and_gradient, terms)

        # Positions of each term: positions with a label come first, so a mask is a comparison with
        # their number and needs nothing from the device.
        N, V = hidden_ND.shape[0], weight_VD.shape[0]
        labelled = torch.arange(N, device=hidden_ND.device) < len(labels_M)
        masks_TN = torch.stack(
            [labelled if term.over == "masked" else torch.ones_like(labelled) for term in terms]
        ).to(wide)
        # One tile of logits per model, reused by every chunk.
        chunk = CHUNK.get(device, CHUNK_GPU)
        tiles = [_tile(min(chunk, N), model) for model in (student, teacher) if model]
        sums_T = torch.zeros(len(terms), dtype=wide, device=hidden_ND.device)
        grad_weight: Tensor | None = None
        hidden = student.hidden_ND[:0]
        logits_nP = hidden.new_empty(0, len(student.weight_VD))
        if with_grad:
            grad_hidden = torch.empty_like(hidden_ND)
            grad_bias = torch.zeros_like(bias_V, dtype=wide)
        with torch.autocast(device, enabled=False):
            # Without autocast, because all operands have their dtype already.
            for start in range(0, N, chunk):
                rows = slice(start, min(start + chunk, N))
                # The chunk before this one. Its product waits until here so that the last one is
                # left over for the backward pass.
                if with_grad and start:
                    grad_weight = _add_product(grad_weight, logits_nP, hidden, wide)
                del logits_nP  # without a tile, two chunks would be in memory
                hidden = student.hidden_ND[rows]
                logits_nP = student.logits(rows, tiles[0])  # overwritten by their gradient
                chunk_T = chunk_losses(
                    logits_nP[:, :V],
                    teacher.logits(rows, tiles[1])[:, :V] if teacher else None,
                    labels_M[rows],
                    masks_TN[:, rows],
                    factors_T,
                    with_grad,
                )
                sums_T += chunk_T
                if with_grad:
                    # The tile now holds d loss / d logits [n, V], and 0 behind them: the chain rule
                    # for logits = hidden W^T + b.
                    grad_hidden[rows] = logits_nP @ student.weight_VD
                    grad_bias += logits_nP[:, :V].sum(0, dtype=wide)

        if with_grad:
            # Leave the last chunk's product to the backward pass: by then the teacher's tile is
            # free, and with one chunk the embedding's gradient does not exist before.
            ctx.save_for_backward(grad_hidden, grad_weight, grad_bias, logits_nP, hidden)
            ctx.dtypes = weight_VD.dtype, bias_V.dtype
        ctx.mark_non_differentiable(sums_T)
        # Not `sums @ factors`: autocast would round a matrix product to bf16, and in fp16 it
        # overflows above 65,504 (docs/log).
        return (sums_T * factors_T).sum(), sums_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, grad_bias, grad_logits, hidden = ctx.saved_tensors
        # The forward pass computed the gradient of an unscaled loss. The incoming gradient is a
        # scalar: one over the token count, times fp16's loss scale.
        scale = grads[0]
        # In place, because a copy is as large as the embedding. Autograd notices the change and
        # refuses a second backward pass through the same graph.
        wide = grad_bias.dtype
        grad_weight = _add_product(grad_weight, grad_logits, hidden, wide)[: len(grad_bias)]
        grad_weight = grad_weight.mul_(scale)
        return (
            (grad_hidden.to(scale.dtype) * scale).to(grad_hidden.dtype),
            grad_weight.to(ctx.dtypes[0]),
            (grad_bias * scale).to(ctx.dtypes[1]),
            *[None] * 6,
        )


def _tile(rows: int, model: Projection) -> Tensor | None:
    """Allocate logits [rows, V]; return None if `product`, which allocates its own, is faster."""
    if have_product("head", model.hidden_ND, model.weight_VD):
        return None
    return model.hidden_ND.new_empty(rows, len(model.weight_VD))


def _add_product(
    total_VD: Tensor | None, grad_logits_nV: Tensor, hidden_nD: Tensor, wide: torch.dtype
) -> Tensor:
    """Return total + grad_logits^T hidden, in place, in fp32 also for half-precision factors."""
    # fp32 and fp64: the product adds to the total itself.
    if hidden_nD.dtype == wide:
        if total_VD is None:
            return grad_logits_nV.t() @ hidden_nD
        return total_VD.addmm_(grad_logits_nV.t(), hidden_nD)
    if hidden_nD.is_cuda and _SUMS_IN_FP32:
        factors = grad_logits_nV.t(), hidden_nD
        if total_VD is None:
            return torch.mm(*factors, out_dtype=wide)
        return torch.addmm(total_VD, *factors, out_dtype=wide, out=total_VD)
    vocabulary = grad_logits_nV.shape[1]
    # The product is in half precision first: computed for some tokens at a time, it takes little
    # memory. In fp16 a sum over thousands of positions may exceed 65,504, hence `shrink`.
    shrink = 64.0 if hidden_nD.dtype == torch.float16 else 1.0
    hidden_nD = hidden_nD / shrink
    if total_VD is None:
        total_VD = hidden_nD.new_zeros(vocabulary, hidden_nD.shape[1], dtype=wide)
    step = WORDS.get(hidden_nD.device.type, vocabulary)
    for start in range(0, vocabulary, step):
        words = slice(start, start + step)
        total_VD[words].add_(grad_logits_nV[:, words].t() @ hidden_nD, alpha=shrink)
    return total_VD


def _fused_losses(
    compute: Callable[..., Values],
    terms: Sequence[VocabularyTerm],
    student_nV: Tensor,
    teacher_nV: Tensor | None,
    labels_m: Tensor,
    masks_Tn: Tensor,
    factors_T: Tensor,
    with_grad: bool,
) -> Tensor:
    """Return a chunk's sums [T]; with `with_grad`, put their gradient in place of the logits."""
    m = len(labels_m)
    # A term's weight at each position: its factor, or 0 where its mean does not count the position.
    # The cross-entropy exists at the m labelled positions only.
    index = {term.fused: i for i, term in enumerate(terms)}
    kl, ce = index.get("kl"), index.get("cross_entropy")
    values = compute(
        student_nV,
        teacher_nV,
        labels_m,
        Weights(
            None if kl is None else masks_Tn[kl] * factors_T[kl],
            None if ce is None else masks_Tn[ce, :m] * factors_T[ce],
        ),
        temperature=1.0 if kl is None else terms[kl].temperature,
        with_gradient=with_grad,
    )
    # Back to the order of `terms`. The values are unweighted: these sums are what is logged.
    by_formula = {"kl": values.kl_n, "cross_entropy": values.cross_entropy_m}
    sums = []
    for term, mask_n in zip(terms, masks_Tn, strict=True):
        value = by_formula[str(term.fused)]
        assert value is not None
        sums.append((value * mask_n[: len(value)]).sum())
    return torch.stack(sums)


def _autograd_losses(
    terms: Sequence[VocabularyTerm],
    student_nV: Tensor,
    teacher_nV: Tensor | None,
    labels_m: Tensor,
    masks_Tn: Tensor,
    factors_T: Tensor,
    with_grad: bool,
) -> Tensor:
    """Compute `_fused_losses` for terms of any form, by their own formulas and autograd."""
    # These formulas take a label for each position: -100 where there is none.
    labels_n = F.pad(labels_m, (0, len(student_nV) - len(labels_m)), value=-100)
    logits_nV = student_nV.detach().requires_grad_(with_grad)
    with torch.set_grad_enabled(with_grad):
        values = (term.values(logits_nV, teacher_nV, labels_n) for term in terms)
        sums_T = torch.stack([(v * mask).sum() for v, mask in zip(values, masks_Tn, strict=True)])
        if with_grad:
            # The same contract as the backends: d (factors . sums) / d logits, in place of the
            # logits.
            (gradient_nV,) = torch.autograd.grad(sums_T @ factors_T, logits_nV)
    if with_grad:
        student_nV.copy_(gradient_nV)
    return sums_T.detach()
