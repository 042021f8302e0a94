"""Compare the Triton kernel of relations, as a GPU runs it, with plain torch in fp64."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.relation_kernels import kernel_errors, needs_triton
from torch import Tensor

from pretrain.kernels.relations import relation_divergence, score_difference


@pytest.mark.gpu
@needs_triton
@pytest.mark.parametrize("longest", [1, 18, 128, 511, 3000])
def test_the_kernel_as_a_gpu_runs_it(longest: int) -> None:
    found = kernel_errors(longest)
    assert max(found.values()) < 1e-5, found


@pytest.mark.gpu
@pytest.mark.parametrize("longest", [37, 9000])  # the kernel takes up to 8,192
@pytest.mark.parametrize("compare", [relation_divergence, score_difference])
def test_a_gpu_computes_what_a_cpu_does(compare: Callable[..., Tensor], longest: int) -> None:
    """Compare value and gradients of a few documents with those of fp64."""
    documents = np.array([[0, longest], [longest, 30], [longest + 30, 29], [longest + 60, 5]])
    generator = torch.Generator().manual_seed(0)
    x, y, tx, ty = (
        torch.randn(1, longest + 66, width, generator=generator) for width in (12, 12, 24, 24)
    )
    results = []
    for device, dtype in (("cuda", torch.float32), ("cpu", torch.float64)):
        student = tuple(t.to(device, dtype).requires_grad_() for t in (x, y))
        value = compare(student, (tx.to(device, dtype), ty.to(device, dtype)), documents, 6)
        results.append([value, *torch.autograd.grad(value, student)])
    for ours, theirs in zip(*results, strict=True):
        assert (ours.cpu().double() - theirs).norm() < 1e-5 * theirs.norm()
