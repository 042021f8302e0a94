"""Give torch's memory-efficient attention a backward pass in compiled graphs.

It is the operator of `scaled_dot_product_attention` for packed rows, and runs uncompiled as it is.
In torch 2.13 the compiler cannot trace its backward pass: that operator's shape function takes
other arguments. Here both passes are operators of our own, with shape functions of our own.

Shapes: N positions, H heads, D head width, S documents.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_NAME = "distil::memory_efficient"
torch.library.define(
    _NAME,
    "(Tensor q, Tensor k, Tensor v, Tensor cu, int max_length, float scale) -> (Tensor, Tensor)",
)
operator = torch.ops.distil.memory_efficient


@torch.library.impl(_NAME, "default")
def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    return attend(*arguments)[:2]


def attend(
    q_1NHD: Tensor,
    k_1NHD: Tensor,
    v_1NHD: Tensor,
    cu: Tensor,
    max_length: int,
    scale: float,
) -> tuple[Any, ...]:
    """Return the output [1, N, H, D], what its backward pass needs, and numbers of dropout."""
    return torch.ops.aten._efficient_attention_forward(
        q_1NHD, k_1NHD, v_1NHD, None, cu, cu, max_length, max_length, 0.0, 0, True, scale=scale
    )


@torch.library.register_fake(_NAME)  # type: ignore[untyped-decorator]
def _(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, max_length: int, *_: Any) -> tuple[Tensor, ...]:
    output = torch.empty_like(q, memory_format=torch.contiguous_format)
    # The kernel rounds lengths up to 32.
    # `len` would freeze the number of documents, which changes from step to step.
    size = cu.shape[0] - 1, q.shape[2], -(-max_length // 32) * 32
    return output, q.new_empty(size, dtype=torch.float32)


@torch.library.custom_op("distil::memory_efficient_backward", mutates_args=())
def _operator_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu: Tensor,
    output: Tensor,
    sums: Tensor,
    max_length: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    unused = torch.zeros((), dtype=torch.int64)  # of dropout
    gradients = torch.ops.aten._efficient_attention_backward(
        *(grad, q, k, v, None, output, cu, cu, max_length, max_length, sums, 0.0, unused, unused),
        *(0, False),
        scale=scale,
    )[:3]
    q, k, v = (t.contiguous() for t in gradients)
    return q, k, v


@_operator_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    return q, k, v


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.max_length, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    settings = ctx.max_length, ctx.scale
    return (*_operator_backward(grad, *ctx.saved_tensors, *settings), None, None, None)


torch.library.register_autograd(_NAME, _backward, setup_context=_keep)
