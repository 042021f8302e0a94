"""Compare the chunked LM head with full logits and autograd in fp64."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from pretrain.kernels.head import Projection, closed_form, vocabulary, vocabulary_losses
from pretrain.objectives.distilbert import DistilBert
from pretrain.objectives.mlm import MaskedLanguageModel
from pretrain.objectives.terms import VocabularyTerm

pytestmark = pytest.mark.usefixtures("one_thread")
N, D, V = 37, 16, 53
COEFFICIENTS = (0.7, 1.3)


def draw(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def projections(dtype: torch.dtype = torch.float64) -> tuple[Projection, Projection]:
    """Return a student that requires gradients, and a teacher."""
    student = Projection(draw(0, N, D).to(dtype), draw(1, V, D).to(dtype), draw(2, V).to(dtype))
    teacher = Projection(draw(3, N, D).to(dtype), draw(4, V, D).to(dtype), draw(5, V).to(dtype))
    for tensor in student:
        tensor.requires_grad_()
    return student, teacher


def some_labels() -> Tensor:
    """Return labels of the first nine positions; the third is -100."""
    labels = torch.arange(9) * 6 + 1
    labels[2] = -100
    return labels


def logit_terms(**changes: float | str) -> list[VocabularyTerm]:
    objective = DistilBert.model_validate(changes)
    return [term for term in objective.terms() if isinstance(term, VocabularyTerm)]


def naive_sums(
    student: Projection,
    teacher: Projection,
    labels: Tensor,
    terms: Sequence[VocabularyTerm],
    t: float = 2.0,
) -> list[Tensor]:
    """Compute the sums from full logits, by formulas independent of `objectives/terms.py`."""

    def log_softmax(x: Tensor) -> Tensor:
        return x - x.exp().sum(-1, keepdim=True).log()

    ours = student.hidden_ND @ student.weight_VD.T + student.bias_V
    theirs = teacher.hidden_ND @ teacher.weight_VD.T + teacher.bias_V
    log_p, log_q = log_softmax(theirs / t), log_softmax(ours / t)
    kl = t * t * (log_p.exp() * (log_p - log_q)).sum(-1)
    predicted = [n for n in range(len(labels)) if labels[n] >= 0]
    log_likelihood = log_softmax(ours)
    sums = {
        ("kl", "tokens"): kl.sum(),
        ("kl", "masked"): kl[: len(labels)].sum(),
        ("mlm", "masked"): torch.stack([-log_likelihood[n, labels[n]] for n in predicted]).sum(),
    }
    return [sums[term.name, term.over] for term in terms]


def close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    difference = (found.double() - expected.double()).abs().max()
    return bool(difference <= tolerance * expected.double().abs().max())


@pytest.mark.parametrize("chunk", [1, 3, 8, 36, 37, 38, 512])
@pytest.mark.parametrize("kl_positions", ["all", "masked"])
def test_chunks_equal_full_logits(
    chunk: int, kl_positions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vocabulary.CHUNK, "cpu", chunk)
    terms = logit_terms(kl_positions=kl_positions)
    coefficients = torch.tensor(COEFFICIENTS, dtype=torch.float64)
    student, teacher = projections()
    labels = some_labels()
    expected = naive_sums(student, teacher, labels, terms)
    expected_loss = 0.7 * expected[0] + 1.3 * expected[1]
    expected_gradients = torch.autograd.grad(2.5 * expected_loss, list(student))

    loss, sums = vocabulary_losses(student, teacher, labels, terms, coefficients)
    (2.5 * loss).backward()
    assert close(sums, torch.stack(expected).detach(), 1e-12)
    assert close(loss.detach(), expected_loss.detach(), 1e-12)
    assert not sums.requires_grad
    for tensor, gradient in zip(student, expected_gradients, strict=True):
        assert tensor.grad is not None and close(tensor.grad, gradient, 1e-12)
    assert all(not tensor.requires_grad for tensor in teacher)


@pytest.mark.parametrize(("changes", "names"), [({"kl": 0}, ["mlm"]), ({"mlm": 0}, ["kl"])])
def test_a_term_alone(changes: dict[str, float], names: list[str]) -> None:
    terms = logit_terms(**changes)
    assert [term.name for term in terms] == names
    student, teacher = projections()
    labels = some_labels()
    (expected,) = naive_sums(student, teacher, labels, terms)
    gradients = torch.autograd.grad(3 * expected, list(student))
    # The cross-entropy alone needs no teacher.
    given = teacher if terms[0].needs_teacher else None
    loss, sums = vocabulary_losses(
        student, given, labels, terms, torch.tensor([3.0], dtype=torch.float64)
    )
    loss.backward()
    assert close(loss.detach(), 3 * expected.detach(), 1e-12)
    assert close(sums, expected.detach()[None], 1e-12)
    for tensor, gradient in zip(student, gradients, strict=True):
        assert tensor.grad is not None and close(tensor.grad, gradient, 1e-12)


def test_masked_language_model_objective() -> None:
    (term,) = MaskedLanguageModel().terms()
    student, _ = projections()
    labels = some_labels()
    logits = student.hidden_ND @ student.weight_VD.T + student.bias_V
    expected = torch.nn.functional.cross_entropy(logits[:9], labels, reduction="sum").detach()
    loss, _ = vocabulary_losses(student, None, labels, [term], torch.ones(1))
    assert (term.weight, term.over, term.needs_teacher) == (1.0, "masked", False)
    assert close(loss.detach(), expected, 1e-12)


@pytest.mark.parametrize("kl_positions", ["all", "masked"])
def test_the_fused_losses_are_the_terms_own_formulas(kl_positions: str) -> None:
    """Compare each closed form with the term's formula and autograd in fp64."""
    fused = logit_terms(kl_positions=kl_positions)
    plain = [term._replace(fused=None) for term in fused]
    coefficients = torch.tensor(COEFFICIENTS, dtype=torch.float64)
    found = []
    for terms in (fused, plain):
        student, teacher = projections()
        loss, sums = vocabulary_losses(student, teacher, some_labels(), terms, coefficients)
        loss.backward()
        found.append([sums, *(tensor.grad for tensor in student)])
    for ours, formula in zip(*found, strict=True):
        assert ours is not None and formula is not None and close(ours, formula, 1e-12)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "autocast"])
def test_lower_precisions(kind: str) -> None:
    """fp32 to 1e-5; bf16 weights, and fp32 weights under autocast, to 2e-2."""
    terms = logit_terms()
    labels = some_labels()
    exact, exact_teacher = projections()
    expected = torch.stack(naive_sums(exact, exact_teacher, labels, terms))
    coefficients = torch.tensor(COEFFICIENTS)
    gradients = torch.autograd.grad(expected @ coefficients.double(), list(exact))

    student, teacher = projections(torch.bfloat16 if kind == "bf16" else torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        loss, sums = vocabulary_losses(student, teacher, labels, terms, coefficients)
    loss.backward()
    tolerance = 1e-5 if kind == "fp32" else 2e-2
    assert loss.dtype == sums.dtype == torch.float32
    assert close(sums, expected.detach(), tolerance)
    for tensor, gradient in zip(student, gradients, strict=True):
        assert tensor.grad is not None and tensor.grad.dtype == tensor.dtype
        assert close(tensor.grad, gradient, tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_autocast_rounds_neither_the_loss_nor_its_scale(dtype: torch.dtype) -> None:
    """A sum over a batch passes fp16's 65,504, and 1/3 in bf16 is a thousandth off."""
    terms = logit_terms()
    labels = some_labels()
    coefficients = torch.tensor([5000.0, 2000.0])
    gradients = []
    for scale in (1.0, 1 / 3):
        student, teacher = projections(torch.float32)
        with torch.autocast("cpu", dtype):
            loss, sums = vocabulary_losses(student, teacher, labels, terms, coefficients)
        assert loss.dtype == torch.float32 and loss.item() > 65_504
        expected = 5000 * sums[0].item() + 2000 * sums[1].item()
        assert loss.item() == pytest.approx(expected, rel=1e-6)
        (loss * scale).backward()
        gradients.append([tensor.grad for tensor in student])
    for whole, third in zip(*gradients, strict=True):
        assert whole is not None and third is not None and close(3 * third, whole, 1e-6)


@pytest.mark.parametrize("labelled", [0, 1, 9])
def test_cross_entropy_is_not_computed_after_the_labels(
    labelled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(closed_form._BLOCK, "cpu", 4 * V)
    student, _ = projections()
    labels = some_labels()[:labelled]
    expected = 0 * student.bias_V.sum()
    if labelled:
        (expected,) = naive_sums(student, student, labels, logit_terms(kl=0))
    gradients = torch.autograd.grad(expected, list(student), allow_unused=True)
    loss, _ = vocabulary_losses(
        student, None, labels, logit_terms(kl=0), torch.ones(1, dtype=torch.float64)
    )
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    for tensor, gradient in zip(student, gradients, strict=True):
        assert tensor.grad is not None
        wanted = torch.zeros_like(tensor) if gradient is None else gradient
        assert torch.allclose(tensor.grad, wanted, rtol=1e-10, atol=1e-13)


def test_a_gradient_beyond_the_range_of_fp16() -> None:
    """Sum over a chunk for a frequent token: 3,000 positions that all miss the same label."""
    labels = torch.full((3000,), 7)
    gradients = []
    for dtype in (torch.float64, torch.float16):
        draws = draw(0, 3000, D).abs() + 2, draw(1, V, D) / 8, draw(2, V)
        student = Projection(*(tensor.to(dtype).requires_grad_() for tensor in draws))
        loss, _ = vocabulary_losses(
            student, None, labels, logit_terms(kl=0), torch.tensor([13.0], dtype=torch.float64)
        )
        (loss / 3000).backward()
        assert student.weight_VD.grad is not None
        gradients.append(student.weight_VD.grad)
    assert (3000 * gradients[0]).abs().max() > 65_504
    assert close(gradients[1], gradients[0], 2e-2)


def test_no_gradient_under_no_grad() -> None:
    terms = logit_terms()
    labels = some_labels()
    student, teacher = projections()
    coefficients = torch.tensor(COEFFICIENTS, dtype=torch.float64)
    with torch.no_grad():
        loss, sums = vocabulary_losses(student, teacher, labels, terms, coefficients)
    assert not loss.requires_grad and not sums.requires_grad
    expected = naive_sums(student, teacher, labels, terms)
    assert close(sums, torch.stack(expected).detach(), 1e-12)


def test_a_frozen_student_gets_values_and_no_gradient() -> None:
    terms = logit_terms()
    labels = some_labels()
    student, teacher = projections()
    frozen = Projection(*(tensor.detach() for tensor in student))
    loss, _ = vocabulary_losses(frozen, teacher, labels, terms, torch.tensor(COEFFICIENTS))
    assert not loss.requires_grad and loss.item() > 0


def test_gradients_accumulate_over_two_calls() -> None:
    """Check that two micro-batches add up their gradients."""
    terms = logit_terms()
    labels = some_labels()
    student, teacher = projections()
    coefficients = torch.tensor(COEFFICIENTS, dtype=torch.float64)
    first = naive_sums(student, teacher, labels, terms)
    gradient = torch.autograd.grad(0.7 * first[0] + 1.3 * first[1], student.weight_VD)[0]
    for _ in range(2):
        vocabulary_losses(student, teacher, labels, terms, coefficients)[0].backward()
    assert student.weight_VD.grad is not None
    assert close(student.weight_VD.grad, 2 * gradient, 1e-12)
