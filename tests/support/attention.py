"""Call attention kernels and compare them with the formula."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from pretrain.contracts.packing import Packing
from pretrain.kernels.attention.cpu import by_document

BOUNDS = [0, 7, 8, 13, 24, 24, 48, 48, 48]  # in two rows of 24; some of no length

LONGEST = 24

SCALE = 0.4


def inputs(*, heads: int = 3, width: int = 8, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Draw query, key, value and the output's gradient: [B, H, L, D] views of [B, L, H, D]."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(2, 24, heads, width, generator=generator) for _ in range(4)]
    q, k, v, grad = (t.to(dtype) for t in drawn)
    return [*(t.transpose(1, 2).requires_grad_() for t in (q, k, v)), grad]


def packing(device: torch.device | str = "cpu") -> Packing:
    bounds, nothing = torch.tensor(BOUNDS, dtype=torch.int32, device=device), torch.empty(0)
    return Packing(nothing, nothing, bounds, LONGEST)


def attended(
    tensors: list[Tensor], dropout: float = 0.0, attend: Any = by_document, window: Any = None
) -> list[Tensor]:
    """Return the output of a kernel and its gradients."""
    output = attend(tuple(tensors[:3]), packing(tensors[0].device), dropout, SCALE, window)
    return with_gradients(output, tensors)


def with_gradients(output: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Return the output [B, L, H, D] and the gradients of query, key and value."""
    *leaves, grad = tensors
    return [output.detach(), *torch.autograd.grad(output, leaves, grad.to(output.dtype))]


def naive(
    tensors: list[Tensor],
    kept: list[Tensor] | None = None,
    keep: float = 1.0,
    window: int | None = None,
) -> Tensor:
    """Compute each document by the formula; `kept` [H, n, n] of each."""
    q, k, v = (t.transpose(1, 2).flatten(0, 1).transpose(0, 1) for t in tensors[:3])  # [H, N, D]
    outputs = []
    spans = [(a, b) for a, b in pairwise(BOUNDS) if b > a]
    for number, (a, b) in enumerate(spans):
        scores = q[:, a:b] @ k[:, a:b].transpose(1, 2) * SCALE
        if window is not None:
            far = [[abs(i - j) > window for j in range(b - a)] for i in range(b - a)]
            scores = scores.masked_fill(torch.tensor(far), -torch.inf)
        weights = scores.softmax(-1)
        if kept is not None:
            weights = weights * kept[number] / keep
        outputs.append(weights @ v[:, a:b])
    return torch.cat(outputs, dim=1).transpose(0, 1).unflatten(0, (2, 24))


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def compare(
    found: list[Tensor], tensors: list[Tensor], bound: float, *dropped: Any, window: Any = None
) -> None:
    """Compare an output and its gradients with `naive` in fp64."""
    exact = [t.detach().cpu().double().requires_grad_() for t in tensors]
    expected = with_gradients(naive(exact, *dropped, window=window), exact)
    for ours, theirs in zip(found, expected, strict=True):
        assert relative(ours.cpu(), theirs) < bound
