"""Compute the closed forms in a compiled function: a few passes over the logits instead of twenty.

It computes exactly `kl_divergence` and `cross_entropy` of `vocabulary_terms.py`, and their
gradients. It runs with `train.compile` where the Triton kernel does not.

Rows are computed in blocks of one size, and the rest of a chunk by `closed_form`. So shapes are
static: the function is compiled once for any chunks, and is the same in a resumed run.

Shapes: R rows of a block; n positions of a chunk, the first m of which have a label; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.kernels.compilation import compile_static
from pretrain.kernels.head import closed_form
from pretrain.kernels.head.closed_form import Values, Weights

# Rows of a block. On a CPU its logits should stay in the cache between passes.
ROWS = {"cpu": 32}
ROWS_GPU = 512


def losses_and_gradient(
    student_nV: Tensor,
    teacher_nV: Tensor | None,
    labels_m: Tensor,
    weights: Weights,
    *,
    temperature: float,
    with_gradient: bool,
) -> Values:
    """Compute `closed_form.losses_and_gradient`, and call it where no gradient is needed."""
    kl_weights, ce_weights = weights
    kl_n, ce_m = (None if w is None else torch.empty_like(w) for w in weights)
    m = 0 if ce_m is None else len(ce_m)
    n = m if kl_n is None else len(kl_n)  # later positions have no term
    rows = ROWS.get(student_nV.device.type, ROWS_GPU)
    # `_block` always computes the gradient. Without one (evaluation) all rows go to `closed_form`.
    whole = n - n % rows if with_gradient else 0
    for start in range(0, whole, rows):
        block = slice(start, start + rows)
        labels_R: tuple[Tensor | None, Tensor | None] = (None, None)
        # The block that holds row m has fewer labels than rows. Static shapes need all blocks to be
        # equal, and a label of -100 has the value 0 and no gradient.
        if ce_weights is not None and start < m:  # pad a block's labels to its length
            missing = (0, max(0, block.stop - m))
            labels_R = (
                F.pad(labels_m[block], missing, value=-100),
                F.pad(ce_weights[block], missing),
            )
        values = _compiled()(
            student_nV[block],
            None if teacher_nV is None or kl_weights is None else teacher_nV[block],
            None if kl_weights is None else kl_weights[block],
            *labels_R,
            temperature,
        )
        # Values of padded labels are cut off here.
        if kl_n is not None and values.kl_n is not None:
            kl_n[block] = values.kl_n
        if ce_m is not None and values.cross_entropy_m is not None:
            ce_m[block] = values.cross_entropy_m[: m - start]
    # The last, shorter block. Compiled, it would need a compilation for each length.
    if whole < n:
        rest = slice(whole, n)
        values = closed_form.losses_and_gradient(
            student_nV[rest],
            None if teacher_nV is None else teacher_nV[rest],
            labels_m[rest],
            Weights(*(None if w is None else w[rest] for w in weights)),
            temperature=temperature,
            with_gradient=with_gradient,
        )
        for of_all, of_rest in zip((kl_n, ce_m), values, strict=True):
            if of_all is not None and of_rest is not None:
                of_all[rest] = of_rest
    if with_gradient:
        # Rows without a term: the caller multiplies the whole chunk by the embedding.
        student_nV[n:] = 0
    return Values(kl_n, ce_m)


@cache
def _compiled() -> Callable[..., Values]:
    return compile_static(_block, whole=True)


def _block(
    student_RV: Tensor,
    teacher_RV: Tensor | None,
    kl_weights_R: Tensor | None,
    labels_R: Tensor | None,
    ce_weights_R: Tensor | None,
    temperature: float,
) -> Values:
    """Return the values, and put the gradient into `student_RV`; for formulas see `closed_form`."""
    # In fp32, because a half-precision softmax is wrong in the second digit. Subtracting the
    # maximum keeps exp in range and changes no softmax.
    wide = torch.float64 if student_RV.dtype == torch.float64 else torch.float32
    s = student_RV.to(wide)
    s = s - s.amax(-1, keepdim=True)
    warm = torch.exp(s * (1 / temperature))
    # exp(s / T): numerator of q in the KL, and, squared at T = 2, of r in the cross-entropy.
    kl_R = ce_R = gradient = None
    if teacher_RV is not None and kl_weights_R is not None:
        # `kl_divergence` of vocabulary_terms.py: T^2 sum p (log p - log q), with p = theirs /
        # their_sum and q = warm / ours_sum.
        t = teacher_RV.to(wide)
        t = t - t.amax(-1, keepdim=True)
        theirs = torch.exp(t * (1 / temperature))
        ours_sum, their_sum = warm.sum(-1), theirs.sum(-1)
        # log p - log q = (t - s) / T + log(ours_sum / their_sum)
        kl_R = (theirs * (t - s)).sum(-1) / their_sum * temperature
        kl_R = kl_R + (ours_sum / their_sum).log() * temperature**2
        # Its gradient, T (q - p), times the weight.
        factor = kl_weights_R * temperature
        gradient = warm * (factor / ours_sum)[:, None] - theirs * (factor / their_sum)[:, None]
    # `cross_entropy` of vocabulary_terms.py: log sum exp(s) - s[label], gradient softmax(s) -
    # onehot(label).
    if labels_R is not None and ce_weights_R is not None:
        # At the default temperature, 2, exp(s) is the square of exp(s / 2): one exponential less.
        cold = warm * warm if temperature == 2 else torch.exp(s)
        total = cold.sum(-1)
        known, index = labels_R >= 0, labels_R.clamp(min=0)[:, None]
        ce_R = torch.where(known, total.log() - s.gather(1, index)[:, 0], 0)
        factor = torch.where(known, ce_weights_R, 0)
        # A comparison with all columns in place of a scatter: it is fused into the same pass.
        words = torch.arange(s.shape[1], device=s.device)
        of_label = torch.where(words == index, factor[:, None], 0)
        ce_gradient = cold * (factor / total)[:, None] - of_label
        gradient = ce_gradient if gradient is None else gradient + ce_gradient
    assert gradient is not None
    # The only write to the logits, after the last read.
    student_RV.copy_(gradient)
    return Values(kl_R, ce_R)
