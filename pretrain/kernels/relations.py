"""Compare how the tokens of a document are related in two models, as MiniLM and TinyBERT do.

It computes `divergence` of the relations in `objectives/minilm.py`, and `squared_difference` of the
scores in `objectives/tinybert.py`; `tests/pretrain/test_relations.py` compares them in fp64. The
sum over heads and tokens is computed in blocks of documents, or of heads of one document, together
with its gradient: the cost is that of the documents, whatever the length of a row, and nothing of
size [heads, length, length] outlives its block.

Shapes: B rows, L row length, n documents of up to P tokens, D width, A relation heads, d = D / A.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pretrain.contracts.batch import Documents, send

# Scores at a time: 1 MB in fp32 on a CPU, 64 MB on a GPU. On an EPYC, one thread, 4 x 512 and 48
# heads, 1 MB takes 2.3 s, 4 MB 2.6, 16 MB 3.0 and 64 MB 6.7. On a GPU the speed is not measured.
_ELEMENTS = {"cpu": 2**18, "cuda": 2**24}
_FILLED = 0.8  # share of the longest document of a block that the others reach
_MASKED = -1e2  # TinyBERT's authors take scores up to this one for masked positions

# (student's scores, teacher's scores, each [n, A, P, P], the keys behind a document [n, 1, 1, P] or
# None) -> (values, the derivative of their sum by the student's scores)
Formula = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]


def relation_divergence(
    student: tuple[Tensor, Tensor],
    teacher: tuple[Tensor, Tensor],
    documents: Documents,
    heads: int,
) -> Tensor:
    """Return the sum over tokens of KL(teacher || student), the mean over heads [], in fp32.

    The KL is that of the softmax of the scores, over the tokens of a document.

    Args:
        student: X and Y, each [B, L, D]; the same tensor twice for a relation of X with itself.
        teacher: X and Y of the teacher, of any width; they get no gradient.
        documents: of the rows.
        heads: relation heads, which divide both widths.
    """
    total: Tensor = _Compared.apply(*student, *teacher, documents, heads, _kl)
    return total


def score_difference(
    student: tuple[Tensor, Tensor],
    teacher: tuple[Tensor, Tensor],
    documents: Documents,
    heads: int,
) -> Tensor:
    """Return the sum over pairs of tokens of a document of (student - teacher)^2 [], in fp32.

    It is the mean over heads, and compares scores before the softmax. As in the code of TinyBERT's
    authors, a score of -100 or less counts as 0, in either model, and gets no gradient.

    Args:
        student .. heads: as in `relation_divergence`; X is query, and Y is key.
    """
    total: Tensor = _Compared.apply(*student, *teacher, documents, heads, _squares)
    return total


def _kl(student: Tensor, teacher: Tensor, behind: Tensor | None) -> tuple[Tensor, Tensor]:
    if behind is not None:
        student, teacher = (s.masked_fill_(behind, -torch.inf) for s in (student, teacher))
    log_s, log_t = student.log_softmax(-1), teacher.log_softmax(-1)
    p, difference = log_t.exp(), log_t - log_s
    if behind is not None:
        difference.masked_fill_(behind, 0.0)  # both are -inf, and p is 0
    # In place, because nothing reads log_s after this.
    return difference.mul_(p), log_s.exp_().sub_(p)


def _squares(student: Tensor, teacher: Tensor, behind: Tensor | None) -> tuple[Tensor, Tensor]:
    # Found before the scores are replaced: a constant 0 has no slope.
    dropped = student <= _MASKED
    teacher = teacher.masked_fill_(teacher <= _MASKED, 0.0)
    difference = student.masked_fill_(dropped, 0.0).sub_(teacher)
    if behind is not None:
        difference.masked_fill_(behind, 0.0)
    return difference.square(), (2 * difference).masked_fill_(dropped, 0.0)


class _Block(NamedTuple):
    """Hold documents of similar lengths, up to P tokens, that are computed together."""

    places_nP: Tensor  # of their tokens; behind a document its first place again
    inside_nP: Tensor | None  # None if all are equally long


@lru_cache(maxsize=8)  # the relations, and layers, of a micro-batch share them
def _blocks(documents: bytes, heads: int, limit: int, device: torch.device) -> tuple[_Block, ...]:
    """Return the documents by their lengths, as many at a time as fit with all their heads."""
    rest = np.frombuffer(documents, np.int64).reshape(-1, 2)
    rest, found = rest[np.argsort(-rest[:, 1], kind="stable")], []
    while len(rest):
        longest = int(rest[0, 1])
        most = max(1, limit // (heads * longest * longest))
        num = min(most, int(np.count_nonzero(rest[:, 1] >= _FILLED * longest)))
        some, rest = rest[:num], rest[num:]
        inside = np.arange(longest) < some[:, 1:]
        places = torch.from_numpy(some[:, :1] + np.arange(longest) * inside)
        mask = None if inside.all() else send(torch.from_numpy(inside), device)
        found.append(_Block(send(places, device), mask))
    return tuple(found)


class _Compared(torch.autograd.Function):
    """Compute the gradient with the value: autograd would keep the scores of all chunks."""

    @staticmethod
    def forward(
        ctx: Any,
        x_BLD: Tensor,
        y_BLD: Tensor,
        teacher_x: Tensor,
        teacher_y: Tensor,
        documents: Documents,
        heads: int,
        formula: Formula,
    ) -> Tensor:
        # fp32 whatever the precision of the inputs; fp64 stays fp64, for tests.
        wide = torch.float64 if x_BLD.dtype == torch.float64 else torch.float32
        total = torch.zeros((), dtype=wide, device=x_BLD.device)
        # In fp32, too: they are not scaled yet, and fp16 would lose small ones. One is enough for
        # a relation of a tensor with itself.
        ctx.dtype, ctx.itself = x_BLD.dtype, y_BLD is x_BLD
        # Contiguous, whatever the inputs are: blocks are added to views.
        grad_x = torch.zeros(x_BLD.shape, dtype=wide, device=x_BLD.device)
        grad_y = grad_x if ctx.itself else torch.zeros_like(grad_x)

        limit = _ELEMENTS.get(x_BLD.device.type, _ELEMENTS["cuda"])
        with torch.autocast(x_BLD.device.type, enabled=False):
            for places_nP, inside_nP in _blocks(
                documents.astype(np.int64).tobytes(), heads, limit, x_BLD.device
            ):
                num, longest = places_nP.shape
                behind = None if inside_nP is None else ~inside_nP[:, None, None]
                parts_nAPd = [
                    t.flatten(0, 1)[places_nP].unflatten(-1, (heads, -1)).transpose(1, 2).to(wide)
                    for t in (x_BLD, y_BLD, teacher_x, teacher_y)
                ]
                # All heads of several documents, or some heads of one.
                at_once = heads if num > 1 else max(1, limit // (longest * longest))
                for head in range(0, heads, at_once):
                    some = slice(head, head + at_once)
                    x, y, tx, ty = (part[:, some] for part in parts_nAPd)
                    scale = x.shape[-1] ** -0.5
                    theirs = tx @ ty.mT * tx.shape[-1] ** -0.5
                    values, slope = formula(x @ y.mT * scale, theirs, behind)
                    if inside_nP is not None:  # a query behind its document counts nothing
                        values *= inside_nP[:, None, :, None]
                        slope *= inside_nP[:, None, :, None]
                    total += values.sum() / heads  # the mean over heads
                    slope *= scale / heads  # d total / d (x y^T)
                    width = slice(head * x.shape[-1], (head + x.shape[1]) * x.shape[-1])
                    for grad, value in ((grad_x, slope @ y), (grad_y, slope.mT @ x)):
                        # A place that occurs again, behind its document, gets zeros.
                        grad.flatten(0, 1)[:, width].index_add_(
                            0, places_nP.flatten(), value.transpose(1, 2).flatten(2).flatten(0, 1)
                        )
        ctx.save_for_backward(grad_x, grad_y)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_y = ctx.saved_tensors
        x = (grad_x * grad).to(ctx.dtype)
        # The one of a relation with itself holds both parts.
        y = None if ctx.itself else (grad_y * grad).to(ctx.dtype)
        return x, y, *[None] * 5
