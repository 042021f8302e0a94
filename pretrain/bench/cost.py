"""Model the cost of distillation: operations a token, and the peak of matrix products."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from pretrain.device.precision import PRECISIONS
from pretrain.kernels.cpu_layers import have_product, product
from pretrain.model.families import MaskedLM


def flops_per_token(
    student: MaskedLM, teacher: MaskedLM | None, row_length: int, head_share: float
) -> float:
    """Return the work of the loss a token: teacher forward, student forward and backward (x 3).

    A layer's forward is 8 D^2 + 4 D F + 4 S D. The head's is 2 D^2 + 2 D V at `head_share` of the
    positions (1 with KL over all tokens, else the masked share).
    """
    total = 0.0
    for model, times in ((student, 3), (teacher, 1)):
        if model is not None:
            config = model.config
            width, layers = config.hidden_size, config.num_hidden_layers
            inner = getattr(config, "intermediate_size", None) or config.hidden_dim
            layer = 8 * width**2 + 4 * width * inner + 4 * row_length * width
            head = head_share * (2 * width**2 + 2 * width * config.vocab_size)
            total += times * (layers * layer + head)
    return total


def peak_flops(device: torch.device, precision: str) -> float:
    """Measure the speed of large matrix products of random numbers on the device, in FLOP/s.

    It is the best of several shapes and many tries: no shape is the fastest on every processor, and
    other work on the machine only slows a product.
    """
    dtype = PRECISIONS[precision].dtype
    size = 1024 if device.type == "cpu" else 4096
    best = 0.0
    for inner in (size, 3 * size):
        a = torch.randn(size, inner, device=device).to(dtype)
        b = torch.randn(inner, size, device=device).to(dtype)
        # Time each library that our layers use.
        products: list[Callable[[], Tensor]] = [partial(torch.matmul, a, b)]
        if have_product(a, b):
            products.append(partial(product, a, b.t(), None))
        for _ in range(5):
            for multiply in products:
                start = time.perf_counter()
                multiply()[0, 0].item()
                best = max(best, 2 * size * size * inner / (time.perf_counter() - start))
    return best
