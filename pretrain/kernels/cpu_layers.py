"""Layers as a processor is quickest with them; on any other device nothing changes.

Linear layers in fp32 are made by oneDNN where it is there: on x86, torch gives fp32 products to MKL
and only half-precision ones to oneDNN, which it ships as well. On an EPYC with AVX-512 oneDNN makes
`x W^T` of a trunk 9 to 26 % faster, its gradient to x up to 19 %, and logits, few rows by many
words, 1.5 to 2.4 times as fast. A weight's own gradient stays with MKL, which is no slower. Other
processors: not measured.

Dropout gets its random numbers four to a draw, where torch makes a draw for each: 1 ms for 1,024
positions of width 768 instead of 8.

Shapes: N rows, D width in, E width out.
"""

from __future__ import annotations

import platform
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_X86 = platform.machine().lower() in ("x86_64", "amd64")
LANES, LEVELS = 4, 2**15  # int16 numbers to one draw of 64 bits, and how many they tell apart


def use_cpu_layers(model: nn.Module) -> None:
    """Turn a model's linear and dropout layers into ours; parameters and names stay.

    What is saved of it are torch's layers. A second derivative, `torch.func` and `torch.jit` are
    not for ours: see `use_torch_layers`.
    """
    for module in model.modules():
        if type(module) in _OURS:
            module.__class__ = _OURS[type(module)]


def use_torch_layers(model: nn.Module) -> None:
    """Undo `use_cpu_layers`."""
    theirs = {ours: theirs for theirs, ours in _OURS.items()}
    for module in model.modules():
        if type(module) in theirs:
            module.__class__ = theirs[type(module)]


class Linear(nn.Linear):
    """`torch.nn.Linear`, of which `product` makes what it can."""

    def forward(self, input: Tensor) -> Tensor:
        """`input W^T + b`; input [..., D], output [..., E]."""
        if torch.compiler.is_compiling() or not have_product(input, self.weight, self.bias):
            return F.linear(input, self.weight, self.bias)
        if not torch.is_grad_enabled():
            return product(input, self.weight, self.bias)
        output: Tensor = _Linear.apply(input, self.weight, self.bias)
        return output


class Dropout(nn.Dropout):
    """`torch.nn.Dropout` with `draw`'s numbers, never in place."""

    def forward(self, input: Tensor) -> Tensor:
        """Return each entry 0 with probability p or else divided by 1 - p."""
        elsewhere = torch.compiler.is_compiling() or input.device.type != "cpu"
        if elsewhere or not self.training or not 0 < self.p < 1:
            return F.dropout(input, self.p, self.training)
        levels = drop_levels(self.p)
        kept = draw(1, input.numel(), levels).view(input.shape) >= 0
        return input * kept.to(input.dtype).mul_(1 / (1 - levels / LEVELS))


_OURS: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: Linear, nn.Dropout: Dropout}


def have_product(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Return whether `product` takes these and is faster; what is wrong with others, torch says."""
    return (
        _X86
        and input.device.type == "cpu"
        and input.dtype == weight.dtype == torch.float32
        and input.shape[-1:] == weight.shape[1:]
        and weight.numel() > 0
        and (bias is None or (bias.dtype == weight.dtype and bias.shape == weight.shape[:1]))
        and not torch.is_autocast_enabled("cpu")
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
    )


def product(input: Tensor, weight_ED: Tensor, bias_E: Tensor | None) -> Tensor:
    """`input weight^T + bias` [..., E], without a gradient."""
    # What torch's own compiler puts in place of a linear layer (since torch 2.0).
    output: Tensor = torch.ops.mkldnn._linear_pointwise(input, weight_ED, bias_E, "none", [], "")
    return output


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight_ED: Tensor, bias_E: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight_ED)
        return product(input, weight_ED, bias_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        input, weight_ED = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        grad_NE, input_ND = (t.reshape(-1, t.shape[-1]) for t in (grad, input))
        return (
            product(grad, weight_ED.t(), None) if needs_input else None,
            grad_NE.t() @ input_ND if needs_weight else None,
            grad_NE.sum(0) if needs_bias else None,
        )


def drop_levels(dropout: float) -> int:
    """Of 32,768 equally likely numbers, how many drop a probability.

    Within 1.6e-5 of `dropout`; near 1 within 3.1e-5, since some are always kept.
    """
    assert 0 <= dropout < 1
    return min(round(dropout * LEVELS), LEVELS - 1)


def draw(rows: int, count: int, levels: int) -> Tensor:
    """int16 [rows, count] from torch's generator, negative with probability levels / 32,768.

    Each row begins a new 64-bit number: rows drawn apart or together get the same.
    """
    words = torch.empty(rows, -(-count // LANES), dtype=torch.int64).random_()
    # Without the uppermost bits: random_() leaves one at 0, and no difference overflows.
    numbers = words.view(torch.int16).bitwise_and_(LEVELS - 1)
    return numbers.sub_(levels)[:, :count]
