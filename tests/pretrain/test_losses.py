"""Compare the losses with their formulas in numpy, fp64."""

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pretrain.objectives.distilbert import cosine_distance
from pretrain.objectives.vocabulary_terms import (
    cross_entropy,
    kl_divergence,
)
from pretrain.tasks.mlm.head_figures import is_correct

Array = NDArray[np.float64]
N, V, D = 13, 41, 17
LABELS = np.random.default_rng(3).integers(0, V, N)
LABELS[[0, 5]] = -100


def draw(seed: int, *shape: int, scale: float = 3.0) -> Array:
    return scale * np.random.default_rng(seed).standard_normal(shape)


def log_softmax(x: Array) -> Array:
    top = x.max(-1, keepdims=True)
    return x - top - np.log(np.exp(x - top).sum(-1, keepdims=True))


def kl_formula(student: Array, teacher: Array, t: float) -> tuple[Array, Array]:
    """Return T^2 sum_v p (log p - log q), and its gradient T (q - p)."""
    log_p, log_q = log_softmax(teacher / t), log_softmax(student / t)
    value = t * t * (np.exp(log_p) * (log_p - log_q)).sum(-1)
    return value, t * (np.exp(log_q) - np.exp(log_p))


def ce_formula(logits: Array, labels: NDArray[np.int64]) -> tuple[Array, Array]:
    """Return -log q[label], and its gradient q - onehot; both 0 where the label is -100."""
    log_q = log_softmax(logits)
    used = labels != -100
    safe = np.where(used, labels, 0)
    value = np.where(used, -log_q[np.arange(len(labels)), safe], 0)
    return value, np.where(used[:, None], np.exp(log_q) - np.eye(logits.shape[1])[safe], 0)


def cosine_formula(s: Array, t: Array) -> tuple[Array, Array]:
    """Return 1 - s.t / |s||t|, and its gradient (cos s/|s| - t/|t|) / |s|."""
    norm_s = np.sqrt((s * s).sum(-1, keepdims=True))
    norm_t = np.sqrt((t * t).sum(-1, keepdims=True))
    cos = (s * t).sum(-1, keepdims=True) / (norm_s * norm_t)
    return 1 - cos[:, 0], (cos * s / norm_s - t / norm_t) / norm_s


CASES = {
    **{
        f"kl, temperature {t}": (
            partial(kl_divergence, temperature=t),
            partial(kl_formula, t=t),
            (draw(0, N, V), draw(1, N, V)),
        )
        for t in (1.0, 2.0, 5.0)
    },
    "cross-entropy": (cross_entropy, ce_formula, (draw(2, N, V), LABELS)),
    "cosine": (cosine_distance, cosine_formula, (draw(4, N, D), draw(5, N, D))),
}


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)],
    ids=["fp64", "fp32", "bf16"],
)
@pytest.mark.parametrize(("loss", "formula", "inputs"), CASES.values(), ids=CASES)
def test_a_loss_follows_its_formula(
    loss: Any, formula: Any, inputs: tuple[Array, Array], dtype: torch.dtype, tolerance: float
) -> None:
    """Compare values and the gradient of their weighted sum, relative to the largest entry."""
    x, other = map(torch.from_numpy, inputs)
    x = x.to(dtype).requires_grad_()
    values = loss(x, other.to(dtype) if other.is_floating_point() else other)
    weights = np.arange(1, N + 1)
    (values * torch.from_numpy(weights).to(values.dtype)).sum().backward()
    value, gradient = formula(*inputs)
    gradient = gradient * weights[:, None]
    assert x.grad is not None and values.shape == (N,)
    assert np.abs(values.detach().numpy() - value).max() <= tolerance * np.abs(value).max()
    assert np.abs(x.grad.double().numpy() - gradient).max() <= tolerance * np.abs(gradient).max()


def test_values_by_hand() -> None:
    # p = (3/4, 1/4) and q = (1/2, 1/2) at temperature 2.
    teacher = torch.tensor([[2 * math.log(3.0), 0.0]], dtype=torch.float64)
    student = torch.zeros(1, 2, dtype=torch.float64)
    kl = 4 * (0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    assert kl_divergence(student, teacher, temperature=2.0).item() == pytest.approx(kl, rel=1e-12)
    logits = torch.tensor([[0.0, math.log(3.0)]], dtype=torch.float64)
    label = torch.tensor([1])
    assert cross_entropy(logits, label).item() == pytest.approx(math.log(4 / 3), rel=1e-12)
    # 3-4-5: cos((3, 4), (4, 3)) = 24 / 25.
    distance = cosine_distance(torch.tensor([[3.0, 4.0]]), torch.tensor([[4.0, 3.0]]))
    assert distance.item() == pytest.approx(1 / 25, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_enormous_logits_stay_finite(dtype: torch.dtype) -> None:
    """Check logits at which a softmax that is not shifted by its maximum overflows."""
    teacher = torch.tensor([[4096.0, 0.0, -4096.0]], dtype=dtype)
    student = torch.tensor([[-4096.0, 0.0, 4096.0]], dtype=dtype, requires_grad=True)
    loss = kl_divergence(student, teacher, temperature=2.0)
    loss.sum().backward()
    assert loss.item() == 4 * 4096.0  # T^2 (log 1 - (-8192 / T))
    assert student.grad is not None and student.grad.tolist() == [[-2.0, 0.0, 2.0]]
    assert cross_entropy(student.detach(), torch.tensor([0])).item() == 8192.0


def test_low_precision_inputs_are_computed_in_fp32() -> None:
    """Check that only the inputs are rounded: a bf16 softmax would be off by a percent."""
    student = torch.from_numpy(draw(8, N, 4096)).bfloat16()
    teacher = torch.from_numpy(draw(9, N, 4096)).bfloat16()
    exact, _ = kl_formula(student.double().numpy(), teacher.double().numpy(), 2.0)
    found = kl_divergence(student, teacher, temperature=2.0)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), exact, rtol=1e-4)


def test_is_correct() -> None:
    student = torch.tensor([[0.0, 2.0, 1.0], [5.0, 0.0, 1.0], [0.0, 1.0, 2.0]])
    teacher = torch.tensor([[0.0, 1.0, 0.5], [0.0, 5.0, 1.0], [3.0, 1.0, 4.0]])
    assert is_correct(student, torch.tensor([1, 1, 2])).tolist() == [1.0, 0.0, 1.0]
    assert is_correct(student, torch.tensor([1, 0, -100])).tolist() == [1.0, 1.0, 0.0]
    assert is_correct(student, teacher.argmax(-1)).tolist() == [1.0, 0.0, 1.0]
