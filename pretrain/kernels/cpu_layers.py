"""Compute `torch.nn.Linear` and `torch.nn.Dropout` faster on a CPU; other devices are unaffected.

The layers run in student and teacher, training and evaluation. `Linear`
computes exactly torch's formula; `Dropout` has torch's distribution, but other random numbers.

Linear layers in fp32 use the library that `products.py` chooses. On an EPYC with AVX-512 oneDNN
computes `x W^T` of an encoder 9 to 26 % faster than MKL, its gradient to x up to 19 %, and logits,
few rows by the whole vocabulary, 1.5 to 2.4 times as fast.

Dropout takes four random numbers from one draw, where torch makes a draw for each: 1 ms for 1,024
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

from pretrain.kernels.products import Kind, by_onednn

_X86 = platform.machine().lower() in ("x86_64", "amd64")
LANES, LEVELS = 4, 2**15  # int16 numbers per draw of 64 bits, and the number of their values


def use_cpu_layers(model: nn.Module) -> None:
    """Turn a model's linear and dropout layers into ours; parameters and names do not change.

    A saved model has torch's layers. Ours support no second derivative, no `torch.func` and no
    `torch.jit`: see `use_torch_layers`.
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
    """Compute `torch.nn.Linear` by `product` where possible."""

    def forward(self, input: Tensor) -> Tensor:
        """Return `input W^T + b` [..., E] of input [..., D]."""
        return linear(input, self.weight, self.bias)


class Dropout(nn.Dropout):
    """Compute `torch.nn.Dropout` with the numbers of `draw`, never in place."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the input, each entry 0 with probability p, otherwise divided by 1 - p."""
        if input.device.type != "cpu" or not self.training or not 0 < self.p < 1:
            return F.dropout(input, self.p, self.training)
        levels = drop_levels(self.p)
        # The scale is that of the probability really used, so the expected value is exact.
        kept = draw(1, input.numel(), levels).view(input.shape) >= 0
        return input * kept.to(input.dtype).mul_(1 / (1 - levels / LEVELS))


_OURS: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: Linear, nn.Dropout: Dropout}


def linear(
    input: Tensor, weight_ED: Tensor, bias_E: Tensor | None, kind: Kind = "forward"
) -> Tensor:
    """Return `input weight^T + bias` [..., E] by the library of this kind, with its gradients."""
    if not have_product(kind, input, weight_ED, bias_E):
        return F.linear(input, weight_ED, bias_E)
    # The teacher's pass: no graph, so no autograd function around the product.
    if not torch.is_grad_enabled():
        return product(input, weight_ED, bias_E)
    output: Tensor = _Linear.apply(input, weight_ED, bias_E)
    return output


def have_product(kind: Kind, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Return whether `product` supports these and is chosen; for a mistake torch has the error."""
    return (
        _X86
        and by_onednn(kind)
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
    """Return `input weight^T + bias` [..., E], without a gradient."""
    # The operator that torch's own compiler puts in place of a linear layer (since torch 2.0).
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
        of_input = of_weight = None
        if needs_input and by_onednn("input gradient"):
            of_input = product(grad, weight_ED.t(), None)
        elif needs_input:
            of_input = grad @ weight_ED
        if needs_weight and by_onednn("weight gradient") and len(grad_NE):  # it takes no 0 rows
            of_weight = product(grad_NE.t(), input_ND.t(), None)
        elif needs_weight:
            of_weight = grad_NE.t() @ input_ND
        return of_input, of_weight, grad_NE.sum(0) if needs_bias else None


def drop_levels(dropout: float) -> int:
    """Return how many of 32,768 equally likely numbers mean "dropped".

    Their share is within 1.6e-5 of `dropout`; near 1 within 3.1e-5, since some are always kept.
    """
    assert 0 <= dropout < 1
    # At least one number must mean "kept": the scale is 1 / (1 - share).
    return min(round(dropout * LEVELS), LEVELS - 1)


def draw(rows: int, count: int, levels: int) -> Tensor:
    """Draw int16 [rows, count] from torch's generator, negative with probability levels / 32,768.

    Each row begins a new 64-bit number, so rows drawn separately or together are identical.
    """
    words = torch.empty(rows, -(-count // LANES), dtype=torch.int64).random_()
    # Clear each sign bit: random_() never sets that of the 64 bits. No difference overflows then.
    numbers = words.view(torch.int16).bitwise_and_(LEVELS - 1)
    return numbers.sub_(levels)[:, :count]
