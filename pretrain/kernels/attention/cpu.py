"""Compute attention on the CPU, one document at a time.

It computes softmax(Q K^T * scale) V within each document, exactly what `masked` in `dispatch.py`
computes with a mask, and runs for packed rows on a CPU.

With dropout, torch's own attention draws one number after the other and does not use its fused
kernel; in bf16 that kernel takes as long as in fp32. Here both are a few large matrix products.

The lengths of documents decide how many products there are.

Shapes: B rows, L row length, N = B * L positions, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from pretrain.contracts.packing import Packing
from pretrain.kernels.cpu_layers import LEVELS, draw, drop_levels

_BYTES_PER_THREAD = 2**20  # so many bytes of scores stay in the cache


Heads = tuple[Tensor, Tensor, Tensor]  # query, key, value [B, H, L, D]


def by_document(
    qkv: Heads, packing: Packing, dropout: float, scale: float, window: int | None = None
) -> Tensor:
    """Attend within one document after the other; `cu_seqlens` may repeat its last bound."""
    assert window is None  # `usable` leaves this kernel out
    # On a CPU this list costs no device sync.
    lengths = [length for length in packing.cu_seqlens.diff().tolist() if length]
    q, k, v = (_positions(t) for t in qkv)
    with torch.autocast("cpu", enabled=False):
        if dropout == 0 and q.dtype in (torch.float32, torch.float64):
            # With slices, each would have a gradient of full size; a split has one for all.
            parts = zip(*(t[None].split(lengths, dim=2) for t in (q, k, v)), strict=True)
            outputs = [F.scaled_dot_product_attention(*part, scale=scale) for part in parts]  # type: ignore[misc]
            output = torch.cat(outputs, dim=2)[0]
        else:
            output = _Attention.apply(q, k, v, lengths, dropout, scale)
    return output.transpose(0, 1).unflatten(0, qkv[0].shape[::2])


def _positions(t_BHLD: Tensor) -> Tensor:
    # [H, N, D], with no copy where a model split heads off its width.
    return t_BHLD.transpose(1, 2).flatten(0, 1).transpose(0, 1)


class _Attention(torch.autograd.Function):
    """Compute attention of [H, N, D] with dropout.

    For the backward pass it keeps the probabilities, negative where they were dropped.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: list[int],
        dropout: float,
        scale: float,
    ) -> Tensor:
        keeps = any(ctx.needs_input_grad)
        output, saved, ctx.how = _attend(query, key, value, lengths, dropout, scale, keeps)
        ctx.save_for_backward(*saved)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (*_gradients(grad, ctx.saved_tensors, *ctx.how), None, None, None)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: list[int],
    dropout: float,
    scale: float,
    keeps: bool,
) -> tuple[Tensor, list[Tensor], tuple[Any, ...]]:
    """Return the output [H, N, D], and tensors and other arguments for `_gradients`."""
    # The probability that is really used, a multiple of 1 / 32,768; outputs are scaled by exactly
    # this one.
    levels = drop_levels(dropout)
    keep = 1 - levels / LEVELS
    # Scale the queries, which have fewer numbers than the scores.
    query = (query * scale).contiguous()
    # Subtract the mean key of the document: probabilities do not change, and half-precision scores
    # become more exact.
    keys = key.split(lengths, dim=1)
    key = torch.cat([k - k.mean(1, keepdim=True) for k in keys], dim=1)
    output, saved = torch.empty_like(value), []
    # (heads, positions) of every document, with as many heads as fit in the cache.
    chunk_bytes, blocks, start = _BYTES_PER_THREAD * torch.get_num_threads(), [], 0
    for length in lengths:
        heads = max(1, chunk_bytes // (length**2 * query.element_size()))
        positions = slice(start, start + length)
        blocks += [(slice(h, h + heads), positions) for h in range(0, len(query), heads)]
        start += length
    for at in blocks:
        # [heads, length, length], freed before the next block; only the probabilities are kept.
        scores = torch.bmm(query[at], key[at].mT)
        probabilities = kept = torch.softmax(scores, -1)
        if levels:
            noise = draw(len(scores), scores[0].numel(), levels).view(scores.shape)
            # Write the mask into the sign bit: it needs no further memory. ReLU drops the negative
            # ones.
            kept = probabilities.copysign_(noise.to(scores.dtype)).relu()
        torch.bmm(kept, value[at], out=output[at])
        if keeps:
            saved.append(probabilities)
    # The output itself is scaled, not each probability.
    output = output.div_(keep) if levels else output
    return output, [query, key, value, *saved], (blocks, keep, scale)


def _gradients(
    grad: Tensor, tensors: Sequence[Tensor], blocks: Any, keep: float, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value [H, N, D]."""
    query, key, value, *saved = tensors
    grad_query, grad_key, grad_value = (torch.empty_like(value) for _ in range(3))
    with torch.autocast("cpu", enabled=False):
        grad = grad / keep
        for at, probabilities in zip(blocks, saved, strict=True):
            # d value: the kept probabilities, as in the forward pass.
            torch.bmm(probabilities.relu().mT, grad[at], out=grad_value[at])
            # d probabilities, then through dropout and softmax to the scores.
            slope = torch.bmm(grad[at], value[at].mT)
            # The derivative of ReLU: 0 where the sign means dropped.
            slope = torch.ops.aten.threshold_backward(slope, probabilities, 0)
            slope = torch._softmax_backward_data(slope, probabilities.abs(), -1, slope.dtype)
            torch.bmm(slope, key[at], out=grad_query[at])
            torch.bmm(slope.mT, query[at], out=grad_key[at])
    return grad_query.mul_(scale), grad_key, grad_value
