"""Compare the LM head and the attention kernels with their formulas in fp64 on the CPU.

Shapes: N positions, the first M of which have a label; D width; V vocabulary; B rows, H heads, L
row length, S documents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import pairwise

import torch
from torch import Tensor

from pretrain.bench.sizes import Sizes
from pretrain.kernels.attention.dispatch import Backend as Attention
from pretrain.kernels.head import Projection
from pretrain.objectives.terms import VocabularyTerm, kl_term, mlm_term

TEMPERATURE = 2.0
COEFFICIENTS = (5.0, 11.0)  # of the sums of KL and cross-entropy
TERMS: tuple[VocabularyTerm, ...] = (kl_term(5.0, temperature=TEMPERATURE), mlm_term(2.0))

# (loss, sums) of student, teacher, labels, terms and factors, as for `vocabulary_losses`.
Head = Callable[
    [Projection, Projection, Tensor, Sequence[VocabularyTerm], Tensor], tuple[Tensor, Tensor]
]


def head_error(head: Head, dtype: torch.dtype, device: torch.device, sizes: Sizes) -> float:
    """Return the largest relative error of the head's loss, sums and gradients."""
    student, teacher, labels_M, expected = head_case(sizes)
    hidden, weight, bias = (tensor.to(device) for tensor in student)
    leaves = [leaf.requires_grad_() for leaf in (hidden.to(dtype), weight.float(), bias.float())]
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        loss, sums = head(
            Projection(*leaves),
            Projection(*(tensor.to(device, dtype) for tensor in teacher)),
            labels_M.to(device),
            TERMS,
            torch.tensor(COEFFICIENTS, device=device),
        )
    found = (loss.detach(), *sums, *torch.autograd.grad(loss, leaves))
    return max(relative_error(f, e) for f, e in zip(found, expected, strict=True))


@lru_cache(maxsize=1)
def head_case(sizes: Sizes) -> tuple[Projection, Projection, Tensor, tuple[Tensor, ...]]:
    """Return student, teacher, labels, and the expected loss, sums and gradients.

    All numbers can be represented in bf16 and fp16, so that one reference serves all precisions. N
    is no multiple of a chunk, and the labels end within a chunk. The width is small, because the
    gate does not depend on it.
    """
    N, D, V = sizes.head_positions, min(sizes.width, 128), sizes.vocabulary
    M = N // 6
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, step: float) -> Tensor:
        steps = (torch.randn(*shape, generator=generator) * 32).round().clamp(-127, 127)
        return steps.double() * step

    student, teacher = (  # logits have a deviation of 3, as those of a trained model
        Projection(draw(N, D, step=1 / 32), draw(V, D, step=2**-7), draw(V, step=1 / 32))
        for _ in range(2)
    )
    labels_M = torch.randint(0, V, (M,), generator=generator)
    labels_M[3] = -100

    leaves = [tensor.clone().requires_grad_() for tensor in student]
    student_NV = leaves[0] @ leaves[1].T + leaves[2]
    teacher_NV = teacher.hidden_ND @ teacher.weight_VD.T + teacher.bias_V
    log_q = (student_NV / TEMPERATURE).log_softmax(-1)
    log_p = (teacher_NV / TEMPERATURE).log_softmax(-1)
    kl = TEMPERATURE**2 * (log_p.exp() * (log_p - log_q)).sum()
    log_q_M = student_NV[:M].log_softmax(-1).gather(1, labels_M.clamp(min=0)[:, None])[:, 0]
    sums = torch.stack([kl, -log_q_M[labels_M >= 0].sum()])
    loss = sums @ torch.tensor(COEFFICIENTS).double()
    gradients = torch.autograd.grad(loss, leaves)
    return student, teacher, labels_M, (loss.detach(), *sums.detach(), *gradients)


def attention_error(
    attend: Attention, dtype: torch.dtype, device: torch.device, sizes: Sizes
) -> float:
    """Return the largest relative error of attention's output and gradients on two rows."""
    H, L, D = max(1, sizes.width // 64), sizes.length, 64
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(2, L, H, D, generator=generator).to(dtype) for _ in range(4)]
    # One document, then several. A bound that is repeated is an empty document, as padding has it.
    bounds = [0, L, L + L // 8, L + L // 8 + 1, 2 * L - L // 3, 2 * L, 2 * L]

    def by_kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return attend(q, k, v, cu_seqlens, L, 0.0, D**-0.5, None)

    def by_formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outputs = []
        for start, end in pairwise(bounds):
            q_HnD, k_HnD, v_HnD = (
                tensor.flatten(0, 1)[start:end].transpose(0, 1) for tensor in (q, k, v)
            )
            weights_Hnn = (q_HnD @ k_HnD.transpose(1, 2) / D**0.5).softmax(-1)
            outputs.append((weights_Hnn @ v_HnD).transpose(0, 1))
        return torch.cat(outputs).view(2, L, H, D)

    results = []
    for function, move in (
        (by_kernel, partial(Tensor.to, device=device)),
        (by_formula, Tensor.double),
    ):
        *leaves, grad = map(move, drawn)
        query, key, value = (leaf.detach().requires_grad_() for leaf in leaves)
        output = function(query, key, value)
        results.append((output, *torch.autograd.grad(output, (query, key, value), grad)))
    return max(relative_error(f, e) for f, e in zip(*results, strict=True))


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return ||found - expected|| / ||expected||, in fp64 on the CPU."""
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    return float((found - expected).norm() / expected.norm())
