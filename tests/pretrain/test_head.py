"""Compare the chunked LM head with full logits and autograd in fp64."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from support.head_inputs import draw, projections
from support.naive_head import logit_terms, naive_sums
from torch import Tensor

from pretrain.contracts.terms import VocabularyTerm
from pretrain.kernels.head import Projection, closed_form, vocabulary, vocabulary_losses

N, D, V = SIZES = 37, 16, 53
COEFFICIENTS = (0.7, 1.3)
LABELS = torch.arange(9) * 6 + 1  # of the first nine positions
LABELS[2] = -100


class Result(NamedTuple):
    loss: Tensor
    sums: Tensor
    gradients: list[Tensor | None]  # of hidden states, weight and bias


def naive(terms: Sequence[VocabularyTerm], coefficients: Sequence[float] = COEFFICIENTS) -> Result:
    """Compute the result from full logits in fp64."""
    student, teacher = projections(*SIZES)
    sums = naive_sums(student, teacher, LABELS, terms)
    loss = sums @ torch.tensor(coefficients, dtype=torch.float64)
    return Result(loss.detach(), sums.detach(), [*torch.autograd.grad(loss, [*student])])


def chunked(
    terms: Sequence[VocabularyTerm],
    coefficients: Sequence[float] = COEFFICIENTS,
    *,
    dtype: torch.dtype = torch.float64,
    autocast: torch.dtype | None = None,
    scale: float = 1.0,
    repeats: int = 1,
) -> Result:
    """Compute the result of `vocabulary_losses`, with gradients of `scale` times the loss."""
    student, teacher = projections(*SIZES, dtype)
    # The cross-entropy alone needs no teacher.
    given = teacher if any(term.needs_teacher for term in terms) else None
    factors = torch.tensor(coefficients, dtype=torch.promote_types(dtype, torch.float32))
    for _ in range(repeats):
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            loss, sums = vocabulary_losses(student, given, LABELS, terms, factors)
        (scale * loss).backward()
    assert not sums.requires_grad
    assert all(not tensor.requires_grad for tensor in teacher)
    assert all(tensor.grad is None or tensor.grad.dtype == tensor.dtype for tensor in student)
    return Result(loss.detach(), sums, [tensor.grad for tensor in student])


def close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    difference = (found.double() - expected.double()).abs().max()
    return bool(difference <= tolerance * expected.double().abs().max())


def compare(found: Result, expected: Result, tolerance: float, scale: float = 1.0) -> None:
    """Compare all parts; the gradients found are `scale` times the expected ones."""
    assert close(found.loss, expected.loss, tolerance)
    assert close(found.sums, expected.sums, tolerance)
    for ours, exact in zip(found.gradients, expected.gradients, strict=True):
        assert ours is not None and exact is not None and close(ours, scale * exact, tolerance)


@pytest.mark.parametrize("chunk", [1, 3, 8, 36, 37, 38, 512])
@pytest.mark.parametrize("kl_positions", ["all", "masked"])
def test_chunks_equal_full_logits(
    chunk: int, kl_positions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vocabulary.CHUNK, "cpu", chunk)
    terms = logit_terms(kl_positions=kl_positions)
    compare(chunked(terms, scale=2.5), naive(terms), 1e-12, scale=2.5)


@pytest.mark.parametrize(("changes", "names"), [({"kl": 0}, ["mlm"]), ({"mlm": 0}, ["kl"])])
def test_a_term_alone(changes: dict[str, float], names: list[str]) -> None:
    terms = logit_terms(**changes)
    assert [term.name for term in terms] == names
    compare(chunked(terms, [3.0]), naive(terms, [3.0]), 1e-12)


@pytest.mark.parametrize("kl_positions", ["all", "masked"])
def test_the_fused_losses_are_the_terms_own_formulas(kl_positions: str) -> None:
    """Compare each closed form with the term's formula and autograd in fp64."""
    fused = logit_terms(kl_positions=kl_positions)
    compare(chunked(fused), chunked([term._replace(fused=None) for term in fused]), 1e-12)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "autocast"])
def test_lower_precisions(kind: str) -> None:
    """Compare fp32 to 1e-5; bf16 weights, and fp32 weights under autocast, to 2e-2."""
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    autocast = torch.bfloat16 if kind == "autocast" else None
    found = chunked(logit_terms(), dtype=dtype, autocast=autocast)
    assert found.loss.dtype == found.sums.dtype == torch.float32
    compare(found, naive(logit_terms()), 1e-5 if kind == "fp32" else 2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_autocast_rounds_neither_the_loss_nor_its_scale(dtype: torch.dtype) -> None:
    """Check a sum over a batch above fp16's 65,504, and 1/3, which bf16 rounds by a thousandth."""
    whole, third = (
        chunked(logit_terms(), (5000, 2000), dtype=torch.float32, autocast=dtype, scale=scale)
        for scale in (1.0, 1 / 3)
    )
    for found in (whole, third):
        assert found.loss.dtype == torch.float32 and found.loss.item() > 65_504
        expected = 5000 * found.sums[0].item() + 2000 * found.sums[1].item()
        assert found.loss.item() == pytest.approx(expected, rel=1e-6)
    compare(third, whole, 1e-6, scale=1 / 3)


@pytest.mark.parametrize("labelled", [0, 1, 9])
def test_cross_entropy_is_not_computed_after_the_labels(
    labelled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(closed_form._BLOCK, "cpu", 4 * V)
    student, _ = projections(*SIZES)
    labels, terms, one = LABELS[:labelled], logit_terms(kl=0), torch.ones(1, dtype=torch.float64)
    (expected,) = naive_sums(student, student, labels, terms)
    gradients = torch.autograd.grad(expected, [*student])
    assert expected != 0 or labelled == 0
    loss, _ = vocabulary_losses(student, None, labels, terms, one)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    for tensor, gradient in zip(student, gradients, strict=True):
        assert tensor.grad is not None
        assert torch.allclose(tensor.grad, gradient, rtol=1e-10, atol=1e-13)


def test_a_gradient_beyond_the_range_of_fp16() -> None:
    """Sum over a chunk for a frequent token: 3,000 positions that all miss the same label."""
    labels, factor = torch.full((3000,), 7), torch.tensor([13.0], dtype=torch.float64)
    gradients = []
    for dtype in (torch.float64, torch.float16):
        draws = draw(0, 3000, D).abs() + 2, draw(1, V, D) / 8, draw(2, V)
        student = Projection(*(tensor.to(dtype).requires_grad_() for tensor in draws))
        loss, _ = vocabulary_losses(student, None, labels, logit_terms(kl=0), factor)
        (loss / 3000).backward()
        assert student.weight_VD.grad is not None
        gradients.append(student.weight_VD.grad)
    assert (3000 * gradients[0]).abs().max() > 65_504
    assert close(gradients[1], gradients[0], 2e-2)


def test_a_frozen_student_gets_values_and_no_gradient() -> None:
    student, teacher = projections(*SIZES)
    frozen = Projection(*(tensor.detach() for tensor in student))
    factors = torch.tensor(COEFFICIENTS)
    loss, _ = vocabulary_losses(frozen, teacher, LABELS, logit_terms(), factors)
    assert not loss.requires_grad and loss.item() > 0


def test_gradients_of_two_micro_batches_add_up() -> None:
    compare(chunked(logit_terms(), repeats=2), naive(logit_terms()), 1e-12, scale=2)
