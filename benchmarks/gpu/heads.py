"""The head's backends against full logits in fp64 on the CPU.

Shapes: N positions, the first M of which have a label; D width; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from pretrain.bench.sizes import Sizes
from pretrain.kernels.head import Backend, Projection, vocabulary_losses
from pretrain.objectives.terms import VocabularyTerm, kl_term, mlm_term

TEMPERATURE = 2.0
COEFFICIENTS = (5.0, 11.0)  # of the sums of KL and cross-entropy
TERMS: tuple[VocabularyTerm, ...] = (kl_term(5.0, temperature=TEMPERATURE), mlm_term(2.0))

# (loss, sums) of student, teacher, labels, terms and coefficients, as `vocabulary_losses` gives it.
Head = Callable[
    [Projection, Projection, Tensor, Sequence[VocabularyTerm], Tensor], tuple[Tensor, Tensor]
]


class HeadSizes(NamedTuple):
    """N is no multiple of a chunk, and the labels end within one."""

    N: int
    M: int
    D: int
    V: int


def sizes(of: Sizes) -> HeadSizes:
    """For models of these sizes; narrower, since the width is not what is in question."""
    positions = of.head_positions
    return HeadSizes(positions, positions // 6, min(of.width, 128), of.vocabulary)


class _Case(NamedTuple):
    student: Projection
    teacher: Projection
    labels_M: Tensor
    expected: tuple[Tensor, ...]  # sums, then the gradients of the student's three


def with_backend(backend: Backend) -> Head:
    """The head that is measured, with one of its backends."""

    def head(
        student: Projection,
        teacher: Projection,
        labels: Tensor,
        terms: Sequence[VocabularyTerm],
        coefficients: Tensor,
    ) -> tuple[Tensor, Tensor]:
        return vocabulary_losses(student, teacher, labels, terms, coefficients, backend=backend)

    return head


def head_error(head: Head, dtype: torch.dtype, device: torch.device, sizes: HeadSizes) -> float:
    """The largest relative error (norm of the difference / norm) of sums and gradients."""
    case = _case(sizes)
    hidden, weight, bias = (tensor.to(device) for tensor in case.student)
    leaves = [hidden.to(dtype), weight.float(), bias.float()]
    for leaf in leaves:
        leaf.requires_grad_()
    coefficients = torch.tensor(COEFFICIENTS, device=device)
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        loss, sums = head(
            Projection(*leaves),
            Projection(*(tensor.to(device, dtype) for tensor in case.teacher)),
            case.labels_M.to(device),
            TERMS,
            coefficients,
        )
    gradients = torch.autograd.grad(loss, leaves)
    total = case.expected[0] @ torch.tensor(COEFFICIENTS).double()
    found = (loss.detach(), *sums, *gradients)
    expected = (total, *case.expected[0], *case.expected[1:])
    return max(relative_error(f, e) for f, e in zip(found, expected, strict=True))


def relative_error(found: Tensor, expected: Tensor) -> float:
    """||found - expected|| / ||expected||, in fp64 on the CPU."""
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    return float((found - expected).norm() / expected.norm())


@lru_cache(maxsize=1)
def _case(sizes: HeadSizes) -> _Case:
    """Every number fits bf16 and fp16, so that one reference serves all precisions."""
    N, M, D, V = sizes
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, step: float) -> Tensor:
        steps = (torch.randn(*shape, generator=generator) * 32).round().clamp(-127, 127)
        return steps.double() * step

    def one() -> Projection:  # logits of deviation 3, as a trained model has
        return Projection(draw(N, D, step=1 / 32), draw(V, D, step=2**-7), draw(V, step=1 / 32))

    student, teacher = one(), one()
    labels_M = torch.randint(0, V, (M,), generator=generator)
    labels_M[3] = -100
    sums, gradients = _reference(student, teacher, labels_M)
    return _Case(student, teacher, labels_M, (sums, *gradients))


def _reference(
    student: Projection, teacher: Projection, labels_M: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Full logits, the formulas as they are written, autograd."""
    leaves = [tensor.clone().requires_grad_() for tensor in student]
    ours = leaves[0] @ leaves[1].T + leaves[2]
    theirs = teacher.hidden_ND @ teacher.weight_VD.T + teacher.bias_V
    log_q = (ours / TEMPERATURE).log_softmax(-1)
    log_p = (theirs / TEMPERATURE).log_softmax(-1)
    kl = TEMPERATURE**2 * (log_p.exp() * (log_p - log_q)).sum()
    of_label = ours[: len(labels_M)].log_softmax(-1).gather(1, labels_M.clamp(min=0)[:, None])[:, 0]
    cross_entropy = -of_label[labels_M >= 0].sum()
    sums = torch.stack([kl, cross_entropy])
    gradients = torch.autograd.grad(sums @ torch.tensor(COEFFICIENTS).double(), leaves)
    return sums.detach(), gradients
