"""Compare the Triton kernel of relations with the formulas of plain torch in fp64."""

from __future__ import annotations

import importlib.util
import itertools

import numpy as np
import pytest
import torch

from pretrain.kernels.relations import compare, formulas

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the package triton is not installed"
)


def kernel_errors(longest: int) -> dict[str, float]:
    """Return relative errors of values and slopes, of equally long documents and of others."""
    from pretrain.kernels.relations import fused

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator, found = torch.Generator().manual_seed(0), {}
    kinds = (
        ("kl", fused.divergence, formulas.divergence, 3.0),
        ("squares", fused.squared_difference, formulas.squared_difference, 80.0),
    )
    lengths = (None, [longest, max(1, longest - 2), max(1, longest // 2)])
    for (name, kernel, formula, size), sizes in itertools.product(kinds, lengths):
        s, t = (size * torch.randn(3, 2, longest, longest, generator=generator) for _ in range(2))
        given = None if sizes is None else torch.tensor(sizes)
        value, slope = formula(s.double(), t.double(), given)
        there = (x.to(device, copy=True) for x in (s, t))
        found_value, found_slope = kernel(*there, None if given is None else given.to(device))
        difference = (found_value.cpu() - value).abs()
        found[f"{name} {sizes}"] = float(difference / value.clamp(min=1e-6))
        difference = (found_slope.cpu() - slope).abs().max()
        found[f"slope of {name} {sizes}"] = float(difference / slope.abs().max().clamp(min=1e-6))
    return found


def relation_errors() -> float:
    """Return the largest relative error of values and gradients of rows, by the kernel."""
    documents = np.array([[0, 9], [9, 7], [16, 8], [24, 1], [25, 20]])
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, 45, width, generator=generator) for width in (12, 12, 24, 24)]
    far = []
    for function in (compare.relation_divergence, compare.score_difference):
        results = []
        for dtype in (torch.float32, torch.float64):
            x, y, tx, ty = (t.to(dtype) for t in drawn)
            student = x.requires_grad_(), y.requires_grad_()
            with pytest.MonkeyPatch.context() as patch:
                # The kernel computes in fp32 and, here, on a CPU.
                patch.setattr(compare, "use_triton", lambda _, t: t.dtype == torch.float32)
                value = function(student, (tx, ty), documents, 6)
            results.append([value, *torch.autograd.grad(value, student)])
        far += [
            float((ours.double() - exact).norm() / exact.norm())
            for ours, exact in zip(*results, strict=True)
        ]
    return max(far)
