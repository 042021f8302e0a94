"""Compute KL and cross-entropy of a chunk of logits with their gradient, in plain torch.

It computes exactly `kl_divergence` and `cross_entropy` of `vocabulary_terms.py`, and the gradients
derived there. It runs on any device for which no other backend is chosen.

Every backend has this signature. The student's logits are overwritten with the gradient: a chunk
needs two tensors of [n, V], the student's and the teacher's, and nothing else of that size.

Shapes: n positions of a chunk, the first m of which have a label; V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Elements at a time. On a CPU they stay in the cache (2^16 to 2^19 are equally fast, a whole chunk
# takes 10 to 25 % longer); on a GPU they bound half a dozen temporaries to 32 MB each.
_BLOCK = {"cpu": 1 << 18}
_BLOCK_GPU = 1 << 23


class Weights(NamedTuple):
    """Hold the factor of each position's value in the loss; 0 leaves a position out."""

    kl_n: Tensor | None  # [n] fp32
    cross_entropy_m: Tensor | None  # [m] fp32


class Values(NamedTuple):
    """Hold the unweighted value of every position of a term; None for a missing term."""

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
    """Return the values; with `with_gradient`, put the gradient of their sum into `student_nV`.

    With s and t the logits, q = softmax(s / T), p = softmax(t / T), r = softmax(s):

        KL  = T^2 sum p (log p - log q),    d KL / ds = T (q - p)
        CE  = -log r[label],                d CE / ds = r - onehot(label)

    The sum is weighted. A label below 0 gives the value 0 and no gradient. `teacher_nV` is
    overwritten, too. In fp32 a KL below about 0.01 has an absolute error of 1e-6 T^2 rather than a
    relative one of 1e-5: it is the difference of nearly equal logarithms.
    """
    # Positions m to n have a KL but no label: `vocabulary_losses` puts positions with a label
    # first, so both terms read one prefix of the chunk.
    vocabulary = student_nV.shape[1]
    wide = torch.float64 if student_nV.dtype == torch.float64 else torch.float32
    m = 0 if weights.cross_entropy_m is None else labels_m.shape[0]
    n = m if weights.kl_n is None else len(student_nV)  # later positions have no term
    kl_n = None if weights.kl_n is None else torch.empty(n, dtype=wide, device=student_nV.device)
    ce_m = torch.empty(m, dtype=wide, device=student_nV.device)
    # Rows of a block, so that it holds about `_BLOCK` elements whatever the vocabulary.
    block = max(1, _BLOCK.get(student_nV.device.type, _BLOCK_GPU) // vocabulary)
    for start in range(0, n, block):
        rows = slice(start, min(start + block, n))
        s = student_nV[rows].to(wide)
        gradient = None
        # `cross_entropy` of vocabulary_terms.py. Only the first m rows have a label, so the block
        # that holds row m is cut there.
        if start < m:
            assert weights.cross_entropy_m is not None
            labelled = slice(start, min(rows.stop, m))
            ce_m[labelled], gradient = _cross_entropy(
                s[: labelled.stop - start],
                labels_m[labelled],
                weights.cross_entropy_m[labelled],
                with_gradient,
            )
        # `kl_divergence` of vocabulary_terms.py. `_kl` overwrites s, so the cross-entropy, which
        # needs the logits without the temperature, comes first.
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
        # No term reads these rows, but the caller multiplies the whole chunk by the embedding:
        # logits left there would count as a gradient.
        student_nV[n:] = 0
    return Values(kl_n, None if weights.cross_entropy_m is None else ce_m)


def _cross_entropy(
    s: Tensor, labels: Tensor, weights: Tensor, with_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    # `cross_entropy` of vocabulary_terms.py: -log r[label], gradient r - onehot(label), r =
    # softmax(s). `gather` needs a valid index, so unlabelled rows read token 0 and are masked
    # below.
    known, index = labels >= 0, labels.clamp(min=0)[:, None]
    largest = s.amax(-1, keepdim=True)
    r = torch.softmax(s, -1)
    # log r[label] = s[label] - s_max - log sum exp(s - s_max), and the largest entry of r is 1 /
    # sum exp(s - s_max). So the sum need not be computed a second time.
    log_r = s.gather(1, index) - largest + r.amax(-1, keepdim=True).log()
    values = torch.where(known, -log_r[:, 0], 0)
    if not with_gradient:
        return values, None
    # r becomes weight * (r - onehot(label)) in place: another [n, V] would leave the CPU's cache.
    factor = torch.where(known, weights, 0)[:, None].to(r.dtype)
    r *= factor
    r.scatter_add_(1, index, -factor)
    return values, r


def _kl(
    s: Tensor, t: Tensor, weights: Tensor, temperature: float, with_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Return (gradient, values); the logits `s` and `t` are overwritten."""
    # `kl_divergence` of vocabulary_terms.py: T^2 sum p (log p - log q), gradient T (q - p), p and q
    # the softmax of t / T and s / T.
    s, t = s.mul_(1 / temperature), t.mul_(1 / temperature)
    s_max, t_max = s.amax(-1), t.amax(-1)
    q, p = torch.softmax(s, -1), torch.softmax(t, -1)
    # log p - log q = t - s + (s_max - t_max) + log(p_max / q_max): each part is small where the two
    # distributions are close, which keeps the difference exact.
    shift = (p.amax(-1) / q.amax(-1)).log() + (s_max - t_max)
    values = torch.linalg.vecdot(p, t.sub_(s)) + shift
    if with_gradient:
        # T (q - p), times the weight of each position.
        q -= p
        q *= (weights * temperature)[:, None]
    return q, values * temperature**2
