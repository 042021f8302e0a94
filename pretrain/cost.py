"""The cost model: operations a token of distillation needs, and what hardware could do of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from pretrain.cpu_layers import have_product, product
from pretrain.models import MaskedLM

# Dense half-precision peak in FLOP/s, from the vendors' data sheets.
_PEAK = {
    "V100": 125e12,
    "T4": 65e12,
    "A10": 125e12,
    "A100": 312e12,
    "L4": 121e12,
    "H100": 989e12,
    "H200": 989e12,
}


def flops_per_token(
    student: MaskedLM, teacher: MaskedLM | None, row_length: int, head_share: float
) -> float:
    """Work the loss needs, a token: the teacher forward, the student forward and backward (x 3).

    A layer's forward is 8 D^2 + 4 D F + 4 S D, the head's 2 D^2 + 2 D V at `head_share` of the
    positions (1 with KL over all tokens, else the masked share).
    """
    total = 3 * _forward_flops(student, row_length, head_share)
    if teacher is not None:
        total += _forward_flops(teacher, row_length, head_share)
    return total


def _forward_flops(model: MaskedLM, row_length: int, head_share: float) -> float:
    config = model.config
    width, layers = config.hidden_size, config.num_hidden_layers
    inner = getattr(config, "intermediate_size", None) or config.hidden_dim
    layer = 8 * width**2 + 4 * width * inner + 4 * row_length * width
    return layers * layer + head_share * (2 * width**2 + 2 * width * config.vocab_size)


@cache
def peak_flops(device: torch.device, precision: str) -> float:
    """The device's peak in FLOP/s: a data sheet's, or what a large matrix product reaches here.

    The best of several shapes and of many tries: no one shape is the fastest on every processor,
    and other work on the machine only slows a product.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for model, peak in sorted(_PEAK.items(), key=lambda item: -len(item[0])):
            if model in name:
                tf32 = torch.cuda.get_device_capability(device) >= (8, 0)
                return peak if precision != "fp32" else peak / (2 if tf32 else 8)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    size = 1024 if device.type == "cpu" else 4096
    best = 0.0
    for inner in (size, 3 * size):
        a = torch.ones(size, inner, device=device, dtype=dtype)
        b = torch.ones(inner, size, device=device, dtype=dtype)
        for _ in range(5):
            for multiply in _products(a, b):
                start = time.perf_counter()
                multiply()[0, 0].item()
                best = max(best, 2 * size * size * inner / (time.perf_counter() - start))
    return best


def _products(a: Tensor, b: Tensor) -> list[Callable[[], Tensor]]:
    """`a b`, by each library that our layers use."""
    ours = [lambda: product(a, b.t(), None)] if have_product(a, b) else []
    return [lambda: a @ b, *ours]
