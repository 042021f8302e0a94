"""Compare the scores of two models in one Triton kernel, with the derivative by the student's.

It computes exactly `divergence` and `squared_difference` of `formulas.py`. Plain torch reads and
writes scores of [n, A, P, P] thirty times; here they are read once, and the derivative is written
over the student's.

Importing this needs the package triton; `triton_support.py` says where it can run.

Shapes: n documents of up to P tokens, A heads; in the kernel R rows of a program, K keys.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LONGEST = 8192  # tokens; a program holds whole rows of both models' scores in its registers
_PROGRAM = 2048  # scores, if a row is not longer

_LOW = tl.constexpr(-1e30)  # below any score; with infinity a row without keys would be inf - inf
_MASKED = tl.constexpr(-1e2)  # `MASKED` of formulas.py


def divergence(student: Tensor, teacher: Tensor, lengths_n: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute `divergence` of `formulas.py`, in fp32."""
    return _compared(student, teacher, lengths_n, kl=True)


def squared_difference(
    student: Tensor, teacher: Tensor, lengths_n: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute `squared_difference` of `formulas.py`, in fp32."""
    return _compared(student, teacher, lengths_n, kl=False)


def _compared(
    student: Tensor, teacher: Tensor, lengths_n: Tensor | None, *, kl: bool
) -> tuple[Tensor, Tensor]:
    assert student.is_contiguous() and teacher.is_contiguous()
    num, heads, longest, _ = student.shape
    values = student.new_empty(num * heads * longest)
    block = max(16, triton.next_power_of_2(longest))
    rows = max(1, _PROGRAM // block)
    with torch.cuda.device_of(student):
        _rows[(triton.cdiv(len(values), rows),)](
            student,
            teacher,
            lengths_n,
            values,
            len(values),
            longest,
            heads * longest,
            KL=kl,
            R=rows,
            K=block,
            num_warps=max(4, block // 512),
        )
    return values.sum(), student


@triton.jit
def _rows(
    student: tl.tensor,
    teacher: tl.tensor,
    lengths: tl.tensor,
    values: tl.tensor,
    num: tl.tensor,
    longest: tl.tensor,
    per_document: tl.tensor,
    KL: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
) -> None:
    """Compare R queries with all their keys."""
    row_R = tl.program_id(0) * R + tl.arange(0, R)
    key_K = tl.arange(0, K)
    there_R = row_R < num
    at_RK = row_R.to(tl.int64)[:, None] * longest + key_K[None, :]
    room_RK = there_R[:, None] & (key_K < longest)[None, :]
    inside_RK = room_RK
    if lengths is not None:
        length_R = tl.load(lengths + row_R // per_document, mask=there_R, other=0)
        counted_R = row_R % longest < length_R  # not a query behind its document
        inside_RK = (counted_R[:, None] & (key_K[None, :] < length_R[:, None])) & room_RK
    s_RK = tl.load(student + at_RK, mask=inside_RK, other=0.0)
    t_RK = tl.load(teacher + at_RK, mask=inside_RK, other=0.0)
    if KL:
        s_RK = tl.where(inside_RK, s_RK, _LOW)
        t_RK = tl.where(inside_RK, t_RK, _LOW)
        s_RK -= tl.max(s_RK, 1)[:, None]
        t_RK -= tl.max(t_RK, 1)[:, None]
        q_RK = tl.where(inside_RK, tl.exp(s_RK), 0.0)
        p_RK = tl.where(inside_RK, tl.exp(t_RK), 0.0)
        z_q_R = tl.sum(q_RK, 1)
        z_p_R = tl.sum(p_RK, 1)
        p_RK = p_RK / z_p_R[:, None]
        # log p - log q, with one logarithm for nearly equal p and q.
        value_RK = p_RK * ((t_RK - s_RK) + tl.log(z_q_R / z_p_R)[:, None])
        slope_RK = q_RK / z_q_R[:, None] - p_RK
    else:
        dropped_RK = s_RK <= _MASKED
        gap_RK = tl.where(dropped_RK, 0.0, s_RK) - tl.where(t_RK <= _MASKED, 0.0, t_RK)
        value_RK = gap_RK * gap_RK
        slope_RK = tl.where(dropped_RK, 0.0, 2 * gap_RK)
    # A row without keys has 0 / 0 until here.
    tl.store(values + row_R, tl.sum(tl.where(inside_RK, value_RK, 0.0), 1), mask=there_R)
    tl.store(student + at_RK, tl.where(inside_RK, slope_RK, 0.0), mask=room_RK)
