"""The attention kernels against the formula in fp64 on the CPU, segment by segment.

Shapes: B rows, H heads, L row length, D head width, N = B * L positions, S segments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.heads import relative_error
from pretrain.bench.sizes import Sizes
from pretrain.kernels.attention.backends import usable

# [B, L, H, D] of query, key, value [B, H, L, D], bounds [S + 1], dropout and scale.
Attention = Callable[[Tensor, Tensor, Tensor, Tensor, float, float], Tensor]


class AttentionSizes(NamedTuple):
    """Two rows: one of a single segment, one of several."""

    H: int
    L: int
    D: int = 64


def offered(device: torch.device, dtype: torch.dtype, head_width: int) -> dict[str, Attention]:
    """The kernels that the project would use here, by name."""
    return {attend.__name__: attend for attend in usable(device, dtype, head_width)}


def sizes(of: Sizes) -> AttentionSizes:
    """As a model of these sizes has them."""
    return AttentionSizes(max(1, of.width // 64), of.length)


def attention_error(
    attend: Attention, dtype: torch.dtype, device: torch.device, of: AttentionSizes
) -> float:
    """The largest relative error of the output and the gradients of query, key and value."""
    H, L, D = of
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(2, L, H, D, generator=generator).to(dtype) for _ in range(4)]
    # A bound that is repeated is a segment of no length, which fills the list up.
    bounds = [0, L, L + L // 8, L + L // 8 + 1, 2 * L - L // 3, 2 * L, 2 * L]
    *leaves, grad = (tensor.to(device) for tensor in drawn)
    query, key, value = (leaf.requires_grad_() for leaf in leaves)
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device)
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    output = attend(q, k, v, cu_seqlens, 0.0, D**-0.5)
    found = (output, *torch.autograd.grad(output, (query, key, value), grad))
    expected = _reference([tensor.double() for tensor in drawn], bounds)
    return max(relative_error(f, e) for f, e in zip(found, expected, strict=True))


def _reference(drawn: Sequence[Tensor], bounds: Sequence[int]) -> list[Tensor]:
    *leaves, grad = drawn
    query, key, value = (leaf.requires_grad_() for leaf in leaves)
    outputs = []
    for start, end in pairwise(bounds):
        q, k, v = (leaf.flatten(0, 1)[start:end].transpose(0, 1) for leaf in (query, key, value))
        scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5  # [H, n, n]
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
    output = torch.cat(outputs).view_as(grad)
    return [output, *torch.autograd.grad(output, (query, key, value), grad)]
