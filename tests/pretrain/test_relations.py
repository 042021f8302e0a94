"""Compare relations in fp64: the kernel, the formula in the paper's file, and a loop."""

import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import accumulate, chain
from pathlib import Path

import numpy as np
import pytest
import torch
from support.relation_kernels import needs_triton
from torch import Tensor

from pretrain.contracts.packing import block_diagonal_mask
from pretrain.kernels.relations import compare as relations
from pretrain.kernels.relations import relation_divergence, score_difference
from pretrain.objectives import minilm, tinybert

LENGTHS = [[5, 3], [8], [2, 1, 5]]  # of documents in rows of 8; the last of row 2 is padding
PADDED = 2
STARTS = torch.tensor([0, *accumulate(chain(*LENGTHS))], dtype=torch.int32)
# Where the documents are, without the padding.
DOCUMENTS = np.stack([STARTS[:5].numpy(), STARTS.diff()[:5].numpy()], axis=1).astype(np.int64)


def kl(student: Tensor, teacher: Tensor) -> Tensor:
    student, teacher = student.softmax(-1), teacher.softmax(-1)
    return (teacher * (teacher.log() - student.log())).sum()


def squares(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the attention loss of TinyBERT's code, `transformer/modeling.py`, before its mean."""
    student, teacher = (torch.where(x <= -1e2, torch.zeros_like(x), x) for x in (student, teacher))
    return torch.nn.functional.mse_loss(student, teacher, reduction="sum")


def naive(
    x: Tensor,
    y: Tensor,
    tx: Tensor,
    ty: Tensor,
    tokens: Tensor,
    heads: int,
    formula: Callable[[Tensor, Tensor], Tensor] = kl,
) -> Tensor:
    """Return the sum over documents of the mean over heads, one at a time."""
    total = x.new_zeros(())
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            here = slice(start, start + length)
            start += length
            if not tokens[row, here].all():
                continue
            for head in range(heads):
                both = []
                for a, b in ((x, y), (tx, ty)):
                    d = a.shape[-1] // heads
                    part = slice(head * d, (head + 1) * d)
                    scores = a[row, here, part] @ b[row, here, part].T / math.sqrt(d)
                    both.append(scores)
                total = total + formula(*both) / heads
    return total


def by_formula(
    compare: Callable[..., Tensor],
    student: tuple[Tensor, Tensor],
    teacher: tuple[Tensor, Tensor],
    tokens: Tensor,
    heads: int,
) -> Tensor:
    """Compute the formula in the paper's file."""
    same = block_diagonal_mask(STARTS, *tokens.shape)[:, 0]
    if compare is relation_divergence:
        both = (minilm.relation(x, y, same, heads) for x, y in (student, teacher))
        return minilm.divergence(*both, tokens)
    both = (tinybert.scores(x, y, heads) for x, y in (student, teacher))
    return tinybert.squared_difference(*both, same & tokens[:, :, None])


# With the size of the inputs: at 10, an eighth of the scores of two tensors are below -100.
COMPARISONS = [(relation_divergence, kl, 1), (score_difference, squares, 10)]


@pytest.mark.parametrize("filled", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("elements", [1, 200, 2**20])
@pytest.mark.parametrize("itself", [True, False])
@pytest.mark.parametrize(("compare", "formula", "size"), COMPARISONS, ids=["kl", "squares"])
def test_value_and_gradients_equal_a_loop(
    compare: Callable[..., Tensor],
    formula: Callable[[Tensor, Tensor], Tensor],
    size: int,
    itself: bool,
    elements: int,
    filled: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(relations._ELEMENTS, "cpu", elements)
    monkeypatch.setattr(relations, "_FILLED", filled)
    relations._blocks.cache_clear()
    generator = torch.Generator().manual_seed(0)
    x, y, tx, ty = (
        size * torch.randn(8, 3, width, generator=generator, dtype=torch.float64).transpose(0, 1)
        for width in (12, 12, 24, 24)
    )
    if itself:
        y, ty = x, tx
    tokens = torch.ones(3, 8, dtype=torch.bool)
    tokens[PADDED, 3:] = False
    x, y = x.requires_grad_(), y.requires_grad_()
    expected = naive(x, y, tx, ty, tokens, 6, formula)
    inputs = [x] if itself else [x, y]
    gradients = torch.autograd.grad(3 * expected, inputs)
    for function, where in ((compare, DOCUMENTS), (partial(by_formula, compare), tokens)):
        found = function((x, y), (tx, ty), where, 6)
        assert expected > 1 and (found - expected).abs() < 1e-9 * expected
        for ours, theirs in zip(torch.autograd.grad(3 * found, inputs), gradients, strict=True):
            assert theirs.abs().max() > 0.1
            assert (ours - theirs).abs().max() < 1e-9 * max(1.0, float(theirs.abs().max()))


def test_a_score_of_minus_100_counts_as_0_and_gets_no_gradient() -> None:
    """Compute by hand: a document of two tokens, then padding; two heads of width 1."""
    # Head 0: [[1, -200], [0.5, -100]] and [[2, 6], [-50, -150]]; head 1: [[1, 2], [1, 2]] and 0.
    q, k = torch.tensor([[[2, 1], [1, 1], [9, 9]], [[0.5, 1], [-100, 2], [9, 9]]]).unsqueeze(1)
    tq, tk = torch.tensor([[[2.0, 0], [-50, 0], [5, 5]], [[1, 0], [3, 0], [5, 5]]]).unsqueeze(1)
    q, k = q.requires_grad_(), k.requires_grad_()
    found = score_difference((q, k), (tq, tk), np.array([[0, 2]]), 2)
    assert found.item() == ((1 + 6**2 + 50.5**2 + 0) + (1 + 4 + 1 + 4)) / 2
    grad_q, grad_k = torch.autograd.grad(found, [q, k])
    assert grad_q.tolist() == [[[-0.5, 5], [25.25, 5], [0, 0]]]
    assert grad_k.tolist() == [[[48.5, 2], [0, 4], [0, 0]]]


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3), (torch.float32, 1e-5)]
)
def test_half_precision_is_computed_in_fp32(dtype: torch.dtype, bound: float) -> None:
    """Compare with the loop on the same rounded inputs; gradients are rounded once, at the end."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(3, 8, width, generator=generator).to(dtype) for width in (12, 24)]
    documents = np.concatenate([DOCUMENTS, [[19, 5]]])  # the padding is one, too
    tokens = torch.ones(3, 8, dtype=torch.bool)
    exact, tx = (t.double() for t in drawn)
    x, exact = drawn[0].requires_grad_(), exact.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):  # which it leaves
        found = relation_divergence((x, x), (drawn[1], drawn[1]), documents, 6)
    expected = naive(exact, exact, tx, tx, tokens, 6)
    assert found.dtype == torch.float32
    assert (found - expected).abs() < 1e-5 * expected
    # As a step scales it: 1 / tokens, which fp16 itself would not hold.
    (ours,) = torch.autograd.grad(found * 1e-9 * 2**24, [x])
    (theirs,) = torch.autograd.grad(expected * 1e-9 * 2**24, [exact])
    assert ours.dtype == dtype
    assert (ours.double() - theirs).norm() < bound * theirs.norm()


@pytest.mark.parametrize("compare", [relation_divergence, score_difference])
def test_scores_do_not_outlive_their_chunk(
    compare: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count what autograd keeps: the gradient of a relation with itself, and nothing else."""
    monkeypatch.setitem(relations._ELEMENTS, "cpu", 8 * 8)
    relations._blocks.cache_clear()
    x = torch.randn(3, 8, 12, requires_grad=True)
    kept = set[int]()

    def keep(tensor: Tensor) -> Tensor:
        kept.add(tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        compare((x, x), (x.detach(), x.detach()), DOCUMENTS, 6)
    assert kept == {3 * 8 * 12 * 4}


@needs_triton
def test_the_triton_kernel_computes_the_same(tmp_path: Path) -> None:
    """Run it interpreted: as one long row in a program, and as several rows in one."""
    code = (
        "from support.relation_kernels import kernel_errors, relation_errors\n"
        "found = [kernel_errors(longest) for longest in (1, 16, 37)]\n"
        "assert max(max(errors.values()) for errors in found) < 1e-5, found\n"
        "assert relation_errors() < 1e-5"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    # Other users of Triton in this process need TRITON_INTERPRET unset.
    command = [sys.executable, "-W", "ignore", "-c", code]
    subprocess.run(command, env=environment, check=True, timeout=600)
