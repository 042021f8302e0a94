"""Compare how the tokens of a document are related in two models, as MiniLM and TinyBERT do.

It computes `divergence` of the relations in `objectives/minilm.py`, and `squared_difference` of the
scores in `objectives/tinybert.py`; `tests/pretrain/test_relations.py` compares them in fp64. The
sum over heads and tokens is computed in chunks of rows and heads, together with its gradient, so
that nothing of size [heads, length, length] outlives its chunk.

Shapes: B rows, b of them at a time, L row length, D width, A relation heads, d = D / A.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pretrain.contracts.packing import block_diagonal_mask

# Scores at a time: 1 MB in fp32 on a CPU, 64 MB on a GPU. On an EPYC, one thread, 4 x 512 and 48
# heads, 1 MB takes 2.3 s, 4 MB 2.6, 16 MB 3.0 and 64 MB 6.7. On a GPU the speed is not measured.
_ELEMENTS = {"cpu": 2**18, "cuda": 2**24}
_MASKED = -1e2  # TinyBERT's authors take scores up to this one for masked positions

# (student's scores, teacher's scores, where a token is of another document), each [b, A, L, L]
# -> (values, the derivative of their sum by the student's scores)
Formula = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def relation_divergence(
    student: tuple[Tensor, Tensor],
    teacher: tuple[Tensor, Tensor],
    cu_seqlens: Tensor,
    token_mask_BL: Tensor,
    heads: int,
) -> Tensor:
    """Return the sum over tokens of KL(teacher || student), the mean over heads [], in fp32.

    The KL is that of the softmax of the scores, over the tokens of a document.

    Args:
        student: X and Y, each [B, L, D]; the same tensor twice for a relation of X with itself.
        teacher: X and Y of the teacher, of any width; they get no gradient.
        cu_seqlens: where documents begin, [S + 1] int32.
        token_mask_BL: False at padding.
        heads: relation heads, which divide both widths.
    """
    total: Tensor = _Compared.apply(*student, *teacher, cu_seqlens, token_mask_BL, heads, _kl)
    return total


def score_difference(
    student: tuple[Tensor, Tensor],
    teacher: tuple[Tensor, Tensor],
    cu_seqlens: Tensor,
    token_mask_BL: Tensor,
    heads: int,
) -> Tensor:
    """Return the sum over pairs of tokens of a document of (student - teacher)^2 [], in fp32.

    It is the mean over heads, and compares scores before the softmax. As in the code of TinyBERT's
    authors, a score of -100 or less counts as 0, in either model, and gets no gradient.

    Args:
        student .. heads: as in `relation_divergence`; X is query, and Y is key.
    """
    total: Tensor = _Compared.apply(*student, *teacher, cu_seqlens, token_mask_BL, heads, _squares)
    return total


def _kl(student: Tensor, teacher: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    log_s = student.masked_fill_(other, -torch.inf).log_softmax(-1)
    log_t = teacher.masked_fill_(other, -torch.inf).log_softmax(-1)
    p = log_t.exp()
    # Outside the document both are -inf, and p is 0 there.
    values = (log_t - log_s).masked_fill_(other, 0.0) * p
    # In place, because nothing reads log_s after this.
    return values, log_s.exp_().sub_(p)


def _squares(student: Tensor, teacher: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    # Found before the scores are replaced: a constant 0 has no slope.
    dropped = student <= _MASKED
    teacher = teacher.masked_fill_(teacher <= _MASKED, 0.0)
    difference = student.masked_fill_(dropped, 0.0).sub_(teacher).masked_fill_(other, 0.0)
    return difference.square(), (2 * difference).masked_fill_(dropped, 0.0)


class _Compared(torch.autograd.Function):
    """Compute the gradient with the value: autograd would keep the scores of all chunks."""

    @staticmethod
    def forward(
        ctx: Any,
        x_BLD: Tensor,
        y_BLD: Tensor,
        teacher_x: Tensor,
        teacher_y: Tensor,
        cu_seqlens: Tensor,
        token_mask_BL: Tensor,
        heads: int,
        formula: Formula,
    ) -> Tensor:
        # fp32 whatever the precision of the inputs; fp64 stays fp64, for tests.
        wide = torch.float64 if x_BLD.dtype == torch.float64 else torch.float32
        rows, length = token_mask_BL.shape
        total = torch.zeros((), dtype=wide, device=x_BLD.device)
        # In fp32, too: they are not scaled yet, and fp16 would lose small ones. One is enough for
        # a relation of a tensor with itself.
        ctx.dtype, ctx.itself = x_BLD.dtype, y_BLD is x_BLD
        grad_x = torch.zeros_like(x_BLD, dtype=wide)
        grad_y = grad_x if ctx.itself else torch.zeros_like(y_BLD, dtype=wide)

        # As many rows as fit with all their heads, or some heads of one row.
        limit = _ELEMENTS.get(x_BLD.device.type, _ELEMENTS["cuda"])
        at_once = max(1, limit // (length * length))
        num_rows, num_heads = max(1, at_once // heads), min(heads, at_once)
        mask = block_diagonal_mask(cu_seqlens, rows, length)  # [B, 1, L, L]
        with torch.autocast(x_BLD.device.type, enabled=False):
            for first in range(0, rows, num_rows):
                row = slice(first, first + num_rows)
                other = ~mask[row]  # tokens of other documents
                # Padding counts nothing. The mean over heads is taken here.
                counts = token_mask_BL[row][:, None, :, None].to(wide) / heads
                parts_bALd = [
                    t[row].unflatten(-1, (heads, -1)).transpose(1, 2).to(wide)
                    for t in (x_BLD, y_BLD, teacher_x, teacher_y)
                ]
                for head in range(0, heads, num_heads):
                    some = slice(head, head + num_heads)
                    x, y, tx, ty = (part[:, some] for part in parts_bALd)
                    scale = x.shape[-1] ** -0.5
                    theirs = tx @ ty.mT * tx.shape[-1] ** -0.5
                    values, slope = formula(x @ y.mT * scale, theirs, other)
                    total += (values * counts).sum()
                    slope *= counts * scale  # d total / d (x y^T)
                    # Both are views, so this writes into the gradients.
                    for grad, value in ((grad_x, slope @ y), (grad_y, slope.mT @ x)):
                        view = grad[row].unflatten(-1, (heads, -1)).transpose(1, 2)
                        view[:, some] += value
        ctx.save_for_backward(grad_x, grad_y)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_y = ctx.saved_tensors
        x = (grad_x * grad).to(ctx.dtype)
        # The one of a relation with itself holds both parts.
        y = None if ctx.itself else (grad_y * grad).to(ctx.dtype)
        return x, y, *[None] * 6
