"""Compute KL and cross-entropy of a chunk of logits with their gradient, in one Triton kernel.

It computes exactly `kl_divergence` and `cross_entropy` of `vocabulary_terms.py`, and their
gradients. `triton_support.py` says where it runs.

There is one program per row. The first pass over the vocabulary accumulates maxima and sums of the
softmaxes; the second writes the gradient over the student's logits. A row of both models has
120 KB in half precision, so the second pass reads it from the cache.

Importing this needs the package triton; `triton_support.py` says where it can run.

Shapes: n positions of a chunk, the first m of which have a label; V vocabulary; in the kernel
W threads of a program, E neighbouring tokens that each of them takes at a time.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pretrain.kernels.head.closed_form import Values, Weights

# A thread takes 8 tokens at a time: one 16-byte load of half precision. Few wide programs keep the
# rows in flight within the L2 cache: two per multiprocessor, 32 MB on an H100. Chosen from the
# compiler's report (under 64 registers per thread, none spilled); not measured.
NUM_WARPS = 16
WORDS_PER_THREAD = 8

_LOW = tl.constexpr(-1e30)  # below any logit; with infinity the first step would be inf - inf


def losses_and_gradient(
    student_nV: Tensor,
    teacher_nV: Tensor | None,
    labels_m: Tensor,
    weights: Weights,
    *,
    temperature: float,
    with_gradient: bool,
) -> Values:
    """Compute `closed_form.losses_and_gradient` in fp32, bf16 or fp16; `teacher_nV` is not changed.

    Values are computed even for rows of weight 0: callers pass only rows of a term, so such a
    weight means that the term's factor is 0. For nearly equal logits the KL has an absolute error
    of 1e-6 T^2, and for equal ones it is exactly 0.
    """
    n, vocabulary = student_nV.shape
    m = 0 if weights.cross_entropy_m is None else labels_m.shape[0]
    kl_n = None if weights.kl_n is None else student_nV.new_empty(n, dtype=torch.float32)
    ce_m = student_nV.new_empty(m, dtype=torch.float32)
    kl_weights, ce_weights = (None if w is None else w.contiguous() for w in weights)
    assert student_nV.stride(1) == 1 and (teacher_nV is None or teacher_nV.stride(1) == 1)
    # A warp has 32 threads. The tail is what is left of the vocabulary after whole blocks, as
    # tokens per thread, rounded up to a power of two as Triton's ranges require.
    threads = 32 * NUM_WARPS
    tail = triton.cdiv(vocabulary % (threads * WORDS_PER_THREAD), threads)
    # Two launches: rows with a label compute both terms, the others only KL. So the kernel needs
    # no branch per row.
    with torch.cuda.device_of(student_nV):
        for start, stop, labelled in ((0, m, True), (m, n, False)):
            if start == stop or not (labelled or kl_n is not None):
                continue
            _row[(stop - start,)](
                student_nV[start:],
                student_nV.stride(0),
                None if kl_n is None or teacher_nV is None else teacher_nV[start:],
                0 if teacher_nV is None else teacher_nV.stride(0),
                labels_m.contiguous() if labelled else None,
                None if kl_weights is None else kl_weights[start:],
                ce_weights if labelled else None,
                None if kl_n is None else kl_n[start:],
                ce_m if labelled else None,
                float(temperature),
                V=vocabulary,
                KL=kl_n is not None,
                CE=labelled,
                GRADIENT=with_gradient,
                W=threads,
                E=WORDS_PER_THREAD,
                TAIL=triton.next_power_of_2(tail) if tail else 0,
                num_warps=NUM_WARPS,
            )
    # Rows without a label have no term then, and the caller multiplies the whole chunk.
    if with_gradient and kl_n is None:
        student_nV[m:] = 0
    return Values(kl_n, None if weights.cross_entropy_m is None else ce_m)


# Of these each program reads one number. Their start may have any alignment, which must not cause
# another compilation.
@triton.jit(
    do_not_specialize_on_alignment=["labels", "kl_weights", "ce_weights", "kl_values", "ce_values"]
)
def _row(
    student: tl.tensor,
    student_stride: tl.tensor,
    teacher: tl.tensor,
    teacher_stride: tl.tensor,
    labels: tl.tensor,
    kl_weights: tl.tensor,
    ce_weights: tl.tensor,
    kl_values: tl.tensor,
    ce_values: tl.tensor,
    temperature: tl.tensor,
    V: tl.constexpr,
    KL: tl.constexpr,
    CE: tl.constexpr,
    GRADIENT: tl.constexpr,
    W: tl.constexpr,
    E: tl.constexpr,
    TAIL: tl.constexpr,
) -> None:
    """Compute a row of logits s and t: q = softmax(s / T), p = softmax(t / T), r = softmax(s),
    z_q = sum exp((s - s_max) / T), z_r = sum exp(s - s_max), z_p = sum exp((t - t_max) / T),
    gap = sum exp((t - t_max) / T) ((t - s) - (t_max - s_max)), by thread, then combined.
    """
    row = tl.program_id(0).to(tl.int64)  # row times stride may pass 2^31
    s_row = student + row * student_stride
    t_row = s_row
    label = -1
    s_label = 0.0
    if KL:
        t_row = teacher + row * teacher_stride
    if CE:
        label = tl.load(labels + row).to(tl.int32)
        s_label = tl.load(s_row + tl.maximum(label, 0)).to(tl.float32)
    inverse_t = 1.0 / temperature
    WHOLE: tl.constexpr = V // (W * E) * (W * E)  # no mask here: it would split 16-byte loads

    # First pass: running maxima and sums, rescaled whenever a maximum grows (online softmax).
    s_max_W = tl.full((W,), _LOW, tl.float32)
    t_max_W = tl.full((W,), _LOW, tl.float32)
    z_q_W = tl.zeros((W,), tl.float32)
    z_p_W = tl.zeros((W,), tl.float32)
    z_r_W = tl.zeros((W,), tl.float32)
    gap_W = tl.zeros((W,), tl.float32)
    for start in range(0, WHOLE, W * E):
        s_max_W, t_max_W, z_q_W, z_p_W, z_r_W, gap_W = _gather(
            s_row, t_row, start, inverse_t, s_max_W, t_max_W, z_q_W, z_p_W, z_r_W, gap_W,
            V, KL, CE, W, E, False,
        )  # fmt: skip
    if TAIL > 0:
        s_max_W, t_max_W, z_q_W, z_p_W, z_r_W, gap_W = _gather(
            s_row, t_row, WHOLE, inverse_t, s_max_W, t_max_W, z_q_W, z_p_W, z_r_W, gap_W,
            V, KL, CE, W, TAIL, True,
        )  # fmt: skip

    # Combine the threads: each has sums relative to its own maxima, and moves them to the row's.
    s_max = tl.max(s_max_W, 0)
    t_max = 0.0
    q_factor = 0.0
    p_factor = 0.0
    r_factor = 0.0
    label_factor = 0.0
    if KL:
        t_max = tl.max(t_max_W, 0)
        moved_W = gap_W + z_p_W * ((t_max_W - s_max_W) - (t_max - s_max))
        decay_W = tl.exp((t_max_W - t_max) * inverse_t)
        gap = tl.sum(moved_W * decay_W, 0)
        z_p = tl.sum(z_p_W * decay_W, 0)
        z_q = tl.sum(z_q_W * tl.exp((s_max_W - s_max) * inverse_t), 0)
        # `kl_divergence` of vocabulary_terms.py, with one logarithm for nearly equal p and q.
        value = gap / z_p * inverse_t + tl.log(z_q / z_p)
        tl.store(kl_values + row, value * temperature * temperature)
        weight = tl.load(kl_weights + row).to(tl.float32) * temperature
        q_factor = weight / z_q
        p_factor = weight / z_p
    if CE:
        # `cross_entropy` of vocabulary_terms.py: log sum exp(s - s_max) - (s[label] - s_max).
        z_r = tl.sum(z_r_W * tl.exp(s_max_W - s_max), 0)
        known = label >= 0
        tl.store(ce_values + row, tl.where(known, tl.log(z_r) - (s_label - s_max), 0.0))
        label_factor = tl.where(known, tl.load(ce_weights + row).to(tl.float32), 0.0)
        r_factor = label_factor / z_r

    # Second pass, over the logits: weight * (T (q - p) + r - onehot(label)), a weight per term.
    if GRADIENT:
        for start in range(0, WHOLE, W * E):
            _write(
                s_row, t_row, start, inverse_t, s_max, t_max, q_factor, p_factor, r_factor,
                label, label_factor, V, KL, CE, W, E, False,
            )  # fmt: skip
        if TAIL > 0:
            _write(
                s_row, t_row, WHOLE, inverse_t, s_max, t_max, q_factor, p_factor, r_factor,
                label, label_factor, V, KL, CE, W, TAIL, True,
            )  # fmt: skip


@triton.jit
def _gather(
    s_row: tl.tensor,
    t_row: tl.tensor,
    start: tl.tensor,
    inverse_t: tl.tensor,
    s_max_W: tl.tensor,
    t_max_W: tl.tensor,
    z_q_W: tl.tensor,
    z_p_W: tl.tensor,
    z_r_W: tl.tensor,
    gap_W: tl.tensor,
    V: tl.constexpr,
    KL: tl.constexpr,
    CE: tl.constexpr,
    W: tl.constexpr,
    E: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Return the maxima and sums after W * E more tokens; no thread waits for another."""
    columns_WE = _columns(start, W, E)
    s_WE = _logits(s_row, columns_WE, V, MASKED)
    s_new_W = tl.maximum(s_max_W, tl.max(s_WE, 1))
    below_WE = s_WE - s_new_W[:, None]
    if CE:
        z_r_W = z_r_W * tl.exp(s_max_W - s_new_W) + tl.sum(tl.exp(below_WE), 1)
    if KL:
        t_WE = _logits(t_row, columns_WE, V, MASKED)
        t_new_W = tl.maximum(t_max_W, tl.max(t_WE, 1))
        exp_t_WE = tl.exp((t_WE - t_new_W[:, None]) * inverse_t)
        decay_W = tl.exp((t_max_W - t_new_W) * inverse_t)
        # Move the sum from the old difference of the maxima to the new one.
        offset_W = t_new_W - s_new_W
        gap_W = (gap_W + z_p_W * ((t_max_W - s_max_W) - offset_W)) * decay_W
        gap_W += tl.sum(exp_t_WE * ((t_WE - s_WE) - offset_W[:, None]), 1)
        z_p_W = z_p_W * decay_W + tl.sum(exp_t_WE, 1)
        exp_s_WE = tl.exp(below_WE * inverse_t)
        z_q_W = z_q_W * tl.exp((s_max_W - s_new_W) * inverse_t) + tl.sum(exp_s_WE, 1)
        t_max_W = t_new_W
    return s_new_W, t_max_W, z_q_W, z_p_W, z_r_W, gap_W


@triton.jit
def _write(
    s_row: tl.tensor,
    t_row: tl.tensor,
    start: tl.tensor,
    inverse_t: tl.tensor,
    s_max: tl.tensor,
    t_max: tl.tensor,
    q_factor: tl.tensor,
    p_factor: tl.tensor,
    r_factor: tl.tensor,
    label: tl.tensor,
    label_factor: tl.tensor,
    V: tl.constexpr,
    KL: tl.constexpr,
    CE: tl.constexpr,
    W: tl.constexpr,
    E: tl.constexpr,
    MASKED: tl.constexpr,
) -> None:
    """Write the gradient of W * E tokens over their logits."""
    columns_WE = _columns(start, W, E)
    s_WE = _logits(s_row, columns_WE, V, MASKED)
    gradient_WE = tl.zeros((W, E), tl.float32)
    if KL:
        # T (q - p): exp((s - s_max) / T) / z_q is q, and the factors hold weight * T / z.
        t_WE = _logits(t_row, columns_WE, V, MASKED)
        gradient_WE = q_factor * tl.exp((s_WE - s_max) * inverse_t)
        gradient_WE -= p_factor * tl.exp((t_WE - t_max) * inverse_t)
    if CE:
        # r - onehot(label).
        gradient_WE += r_factor * tl.exp(s_WE - s_max)
        gradient_WE -= tl.where(columns_WE == label, label_factor, 0.0)
    gradient_WE = gradient_WE.to(s_row.dtype.element_ty)
    if MASKED:
        tl.store(s_row + columns_WE, gradient_WE, mask=columns_WE < V)
    else:
        tl.store(s_row + columns_WE, gradient_WE)


@triton.jit
def _columns(start: tl.tensor, W: tl.constexpr, E: tl.constexpr) -> tl.tensor:
    return start + tl.arange(0, W)[:, None] * E + tl.arange(0, E)[None, :]


@triton.jit
def _logits(
    row: tl.tensor, columns_WE: tl.tensor, V: tl.constexpr, MASKED: tl.constexpr
) -> tl.tensor:
    if MASKED:
        logits_WE = tl.load(row + columns_WE, mask=columns_WE < V).to(tl.float32)
        # Beyond the vocabulary: below any logit, so the softmax gives 0 there.
        logits_WE = tl.where(columns_WE < V, logits_WE, _LOW)
    else:
        logits_WE = tl.load(row + columns_WE).to(tl.float32)
    return logits_WE
