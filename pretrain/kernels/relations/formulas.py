"""Compare the scores of two models in plain torch, with the derivative by the student's.

They are the formulas of `objectives/minilm.py` and `objectives/tinybert.py`, for a block of
`compare.py`: student's and teacher's scores, each [n, A, P, P], and the lengths of the documents
[n], or None if all are P -> the sum of the values [], its derivative by the student's scores. The
scores may be overwritten.

Shapes: n documents of up to P tokens, A heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

MASKED = -1e2  # TinyBERT's authors take scores up to this one for masked positions


def divergence(student: Tensor, teacher: Tensor, lengths_n: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute a block's KL(teacher || student) and its derivative."""
    inside = None
    if lengths_n is not None:
        inside = _inside(lengths_n, student)
        behind = ~inside[:, None, None]
        student, teacher = (s.masked_fill_(behind, -torch.inf) for s in (student, teacher))
    log_s, log_t = student.log_softmax(-1), teacher.log_softmax(-1)
    p, difference = log_t.exp(), log_t - log_s
    if inside is not None:
        difference.masked_fill_(behind, 0.0)  # both are -inf, and p is 0
    # In place, because nothing reads log_s after this.
    return _counted(difference.mul_(p), log_s.exp_().sub_(p), inside)


def squared_difference(
    student: Tensor, teacher: Tensor, lengths_n: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute a block's squares and their derivative, with the authors' clamp."""
    # Found before the scores are replaced: a constant 0 has no slope.
    dropped = student <= MASKED
    teacher = teacher.masked_fill_(teacher <= MASKED, 0.0)
    difference = student.masked_fill_(dropped, 0.0).sub_(teacher)
    inside = None
    if lengths_n is not None:
        inside = _inside(lengths_n, student)
        difference.masked_fill_(~inside[:, None, None], 0.0)
    return _counted(difference.square(), (2 * difference).masked_fill_(dropped, 0.0), inside)


def _inside(lengths_n: Tensor, scores: Tensor) -> Tensor:
    """Return which places are in their document [n, P]."""
    return torch.arange(scores.shape[-1], device=scores.device) < lengths_n[:, None]


def _counted(values: Tensor, slope: Tensor, inside_nP: Tensor | None) -> tuple[Tensor, Tensor]:
    """Leave out the queries behind their document."""
    if inside_nP is not None:
        values *= inside_nP[:, None, :, None]
        slope *= inside_nP[:, None, :, None]
    return values.sum(), slope
