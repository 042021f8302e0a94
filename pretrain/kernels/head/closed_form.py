"""KL and cross-entropy of a chunk of logits with their gradient, in plain torch on any device.

Computes exactly `kl_divergence` and `cross_entropy` of `objectives/terms.py`, and the gradients
derived there.

Every backend has this signature. The student's logits are overwritten with the gradient: a chunk
needs two tiles of [n, V], the student's and the teacher's, and nothing else of that size.

Shapes: n positions of a chunk, the first m of which have a label; V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Elements that are worked through at a time. On a processor they stay in its cache (2^16 to 2^19
# are alike, a whole chunk takes 10 to 25 % longer); on a GPU half a dozen temporaries of 32 MB do.
_BLOCK = {"cpu": 1 << 18}
_BLOCK_GPU = 1 << 23


class Weights(NamedTuple):
    """What each position's values are multiplied with in the loss; 0 leaves a position out."""

    kl_n: Tensor | None  # [n] fp32
    cross_entropy_m: Tensor | None  # [m] fp32


class Values(NamedTuple):
    """Unweighted, of every position the term looks at; None for a term that is not there."""

    kl_n: Tensor | None  # [n] fp32, T^2 KL(teacher || student)
    cross_entropy_m: Tensor | None  # [m] fp32


def losses_and_gradient(
    student_nV: Tensor,
    teacher_nV: Tensor | None,
    labels_m: Tensor,
    weights: Weights,
    *,
    temperature: float,
    with_gradient: bool,
) -> Values:
    """Return the values; with `with_gradient`, `student_nV` becomes the gradient of their weighted
    sum.

    With s and t the logits, q = softmax(s / T), p = softmax(t / T), r = softmax(s):

        KL  = T^2 sum p (log p - log q),    d KL / ds = T (q - p)
        CE  = -log r[label],                d CE / ds = r - onehot(label)

    A label below 0 gives the value 0, and no gradient whatever the weight. `teacher_nV` is
    overwritten, too. In fp32 a KL below about 0.01 is right to 1e-6 T^2 rather than to 1e-5 of
    itself: it is the difference of logarithms that are as good as equal.
    """
    vocabulary = student_nV.shape[1]
    wide = torch.float64 if student_nV.dtype == torch.float64 else torch.float32
    m = 0 if weights.cross_entropy_m is None else labels_m.shape[0]
    n = m if weights.kl_n is None else len(student_nV)  # behind them there is nothing to do
    kl_n = None if weights.kl_n is None else torch.empty(n, dtype=wide, device=student_nV.device)
    ce_m = torch.empty(m, dtype=wide, device=student_nV.device)
    block = max(1, _BLOCK.get(student_nV.device.type, _BLOCK_GPU) // vocabulary)
    for start in range(0, n, block):
        rows = slice(start, min(start + block, n))
        s = student_nV[rows].to(wide)
        gradient = None
        if start < m:
            assert weights.cross_entropy_m is not None
            labelled = slice(start, min(rows.stop, m))
            ce_m[labelled], gradient = _cross_entropy(
                s[: labelled.stop - start],
                labels_m[labelled],
                weights.cross_entropy_m[labelled],
                with_gradient,
            )
        if kl_n is not None:
            assert teacher_nV is not None and weights.kl_n is not None
            t = teacher_nV[rows].to(wide)
            q, kl_n[rows] = _kl(s, t, weights.kl_n[rows], temperature, with_gradient)
            if gradient is not None:
                q[: gradient.shape[0]] += gradient
            gradient = q
        if with_gradient:
            assert gradient is not None
            student_nV[start : start + gradient.shape[0]] = gradient
    if with_gradient:
        student_nV[n:] = 0
    return Values(kl_n, None if weights.cross_entropy_m is None else ce_m)


def _cross_entropy(
    s: Tensor, labels: Tensor, weights: Tensor, with_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    known, index = labels >= 0, labels.clamp(min=0)[:, None]
    largest = s.amax(-1, keepdim=True)
    r = torch.softmax(s, -1)
    log_r = s.gather(1, index) - largest + r.amax(-1, keepdim=True).log()
    values = torch.where(known, -log_r[:, 0], 0)
    if not with_gradient:
        return values, None
    factor = torch.where(known, weights, 0)[:, None].to(r.dtype)
    r *= factor
    r.scatter_add_(1, index, -factor)
    return values, r


def _kl(
    s: Tensor, t: Tensor, weights: Tensor, temperature: float, with_gradient: bool
) -> tuple[Tensor, Tensor]:
    """(gradient, values); the logits `s` and `t` are overwritten."""
    s, t = s.mul_(1 / temperature), t.mul_(1 / temperature)
    s_max, t_max = s.amax(-1), t.amax(-1)
    q, p = torch.softmax(s, -1), torch.softmax(t, -1)
    # log p - log q = t - s + (s_max - t_max) + log(p_max / q_max); of terms that are small where
    # the two distributions are near.
    shift = (p.amax(-1) / q.amax(-1)).log() + (s_max - t_max)
    values = torch.linalg.vecdot(p, t.sub_(s)) + shift
    if with_gradient:
        q -= p
        q *= (weights * temperature)[:, None]
    return q, values * temperature**2
