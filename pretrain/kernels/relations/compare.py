"""Compute relations and their gradient in blocks of documents, with the kernel of the device.

It computes `divergence` of the relations in `objectives/minilm.py`, and `squared_difference` of the
scores in `objectives/tinybert.py`; `tests/pretrain/test_relations.py` compares them in fp64. The
cost is that of the documents, whatever the length of a row. A block holds documents of similar
lengths, or some heads of one, and nothing of size [heads, length, length] outlives its block.

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
from pretrain.kernels.relations.formulas import divergence, squared_difference
from pretrain.kernels.triton_support import use_triton

# Scores at a time: 1 MB in fp32 on a CPU. On an EPYC, one thread, 4 x 512 and 48 heads, 1 MB takes
# 2.3 s, 4 MB 2.6, 16 MB 3.0 and 64 MB 6.7. On an H100 a step of MiniLM, 32 x 512, takes 110 ms with
# 64 MB, 87 with 128 and 45 with 256: a launch costs more than its work. The Triton kernel has two
# tensors of them, plain torch seven.
_ELEMENTS = {"cpu": 2**18, "cuda": 2**24, "triton": 2**26}
_FILLED = 0.8  # share of the longest document of a block that the others reach

# A function of `formulas.py`, or of `fused.py`.
Formula = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]


def relation_divergence(
    student: tuple[Tensor, ...],
    teacher: tuple[Tensor, ...],
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
    total: Tensor = _Compared.apply(*student, *teacher, documents, heads, divergence)
    return total


def score_difference(
    student: tuple[Tensor, ...],
    teacher: tuple[Tensor, ...],
    documents: Documents,
    heads: int,
) -> Tensor:
    """Return the sum over pairs of tokens of a document of (student - teacher)^2 [], in fp32.

    It is the mean over heads, and compares scores before the softmax. As in the code of TinyBERT's
    authors, a score of -100 or less counts as 0, in either model, and gets no gradient.

    Args:
        student .. heads: as in `relation_divergence`; X is query, and Y is key.
    """
    total: Tensor = _Compared.apply(*student, *teacher, documents, heads, squared_difference)
    return total


def _kernel_of(formula: Formula, longest: int) -> Formula:
    """Return the Triton kernel of a formula, if documents are short enough for it."""
    from pretrain.kernels.relations import fused  # needs the package triton

    if longest > fused.LONGEST:
        return formula
    return fused.divergence if formula is divergence else fused.squared_difference


class _Block(NamedTuple):
    """Hold documents of similar lengths, up to P tokens, that are computed together."""

    places_nP: Tensor  # where their tokens are; after a document its first place again
    lengths_n: Tensor | None  # None if all are P


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
        starts, lengths = some[:, :1], some[:, 1:]
        index = np.arange(longest)
        places = torch.from_numpy(starts + index * (index < lengths))
        even = bool((lengths == longest).all())
        sizes = None if even else send(torch.from_numpy(lengths[:, 0].copy()), device)
        found.append(_Block(send(places, device), sizes))
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

        by_triton = use_triton("auto", total)
        limit = _ELEMENTS.get("triton" if by_triton else x_BLD.device.type, _ELEMENTS["cuda"])
        with torch.autocast(x_BLD.device.type, enabled=False):
            for places_nP, lengths_n in _blocks(
                documents.astype(np.int64).tobytes(), heads, limit, x_BLD.device
            ):
                num, longest = places_nP.shape
                x_nAPd, y_nAPd, teacher_x_nAPd, teacher_y_nAPd = (
                    t.flatten(0, 1)[places_nP].unflatten(-1, (heads, -1)).transpose(1, 2).to(wide)
                    for t in (x_BLD, y_BLD, teacher_x, teacher_y)
                )
                scale = x_nAPd.shape[-1] ** -0.5
                # X is scaled, which has fewer numbers than the scores. Not in place: Y may be X.
                x_nAPd = x_nAPd * scale
                teacher_x_nAPd = teacher_x_nAPd * teacher_x_nAPd.shape[-1] ** -0.5
                compare = _kernel_of(formula, longest) if by_triton else formula
                # All heads of several documents, or some heads of one.
                at_once = heads if num > 1 else max(1, limit // (longest * longest))
                for head in range(0, heads, at_once):
                    some = slice(head, head + at_once)
                    x, y = x_nAPd[:, some], y_nAPd[:, some]
                    theirs = teacher_x_nAPd[:, some] @ teacher_y_nAPd[:, some].mT
                    value, slope = compare(x @ y.mT, theirs, lengths_n)
                    total += value
                    width = slice(head * x.shape[-1], (head + x.shape[1]) * x.shape[-1])
                    for grad, part in ((grad_x, (slope @ y).mul_(scale)), (grad_y, slope.mT @ x)):
                        # A place that occurs again, behind its document, gets zeros.
                        grad.flatten(0, 1)[:, width].index_add_(
                            0, places_nP.flatten(), part.transpose(1, 2).flatten(2).flatten(0, 1)
                        )
        ctx.heads = heads
        ctx.save_for_backward(grad_x, grad_y)
        return total / heads  # the mean over heads

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_y = ctx.saved_tensors
        grad = grad / ctx.heads
        x = (grad_x * grad).to(ctx.dtype)
        # For X X^T grad_x already holds both contributions.
        y = None if ctx.itself else (grad_y * grad).to(ctx.dtype)
        return x, y, *[None] * 5
