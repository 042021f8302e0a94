"""Compare the kernels of the LM head with the formula in fp64."""

from __future__ import annotations

import importlib.util
from functools import partial

import pytest
import torch
from support.head_inputs import draw, projections
from torch import Tensor

from pretrain.kernels.head import Backend, vocabulary_losses
from pretrain.kernels.head.closed_form import Weights
from pretrain.objectives.vocabulary_terms import kl_term, mlm_term

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the package triton is not installed"
)

ON_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)

DEVICE = "cuda" if ON_GPU else "cpu"

# Less than a step of the kernel, one step, several, with and without a tail; its real steps are
# too long for the interpreter.
SIZES = [2, 4096, 9001, 30522] if ON_GPU else [2, 53, 64, 200, 257]

TEMPERATURE = 2.0

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}

DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def tile(values: Tensor, dtype: torch.dtype, padding: int) -> Tensor:
    """Return the values on the device, with a stride larger than the row."""
    n, width = values.shape
    room = torch.full((n, width + padding), float("nan"), dtype=dtype, device=DEVICE)
    room[:, :width] = values
    return room[:, :width]


def exact(s: Tensor, t: Tensor, labels: Tensor, weights: Weights) -> tuple[Tensor, Tensor, Tensor]:
    """Return (KL [n], cross-entropy [m], gradient of their weighted sum [n, V]) in fp64."""
    s, t = s.double().cpu().requires_grad_(), t.double().cpu()
    log_p, log_q = ((x / TEMPERATURE).log_softmax(-1) for x in (t, s))
    kl = TEMPERATURE**2 * (log_p.exp() * (log_p - log_q)).sum(-1)
    cross_entropy = torch.zeros(len(labels), dtype=torch.float64)
    for row, label in enumerate(labels.tolist()):
        if label >= 0:
            cross_entropy[row] = -s[row].log_softmax(-1)[label]
    total = torch.zeros((), dtype=torch.float64)
    for values, given in ((kl, weights.kl_n), (cross_entropy, weights.cross_entropy_m)):
        if given is not None:
            total = total + values @ given.double().cpu()
    (gradient,) = torch.autograd.grad(total, s)
    return kl.detach(), cross_entropy.detach(), gradient


def error(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest number."""
    difference = (found.double().cpu() - expected).abs().max()
    return (difference / expected.abs().max()).item()


def kernel_errors(
    dtype: torch.dtype, vocabulary: int, kl: bool, ce: bool, with_gradient: bool
) -> dict[str, float]:
    """Return the kernel's errors on seven rows: four with a label, one of weight 0."""
    from pretrain.kernels.head.triton_kernel import losses_and_gradient

    n, m = 7, 4
    s = tile(3 * draw(0, n, vocabulary), dtype, 11)
    t = tile(3 * draw(1, n, vocabulary) + 5, dtype, 3)
    labels = torch.tensor([0, vocabulary - 1, -100, vocabulary // 2], device=DEVICE)
    kl_weights = draw(2, n).abs().float().to(DEVICE)
    kl_weights[5] = 0
    ce_weights = draw(3, m).abs().float().to(DEVICE)
    weights = Weights(kl_weights if kl else None, ce_weights if ce else None)
    expected_kl, expected_ce, expected_gradient = exact(s, t, labels, weights)
    before, teacher_before = s.clone(), t.clone()
    run = partial(losses_and_gradient, temperature=TEMPERATURE, with_gradient=with_gradient)
    values = run(s, t if kl else None, labels, weights)
    errors = {}
    if values.kl_n is not None:
        errors["kl"] = error(values.kl_n, expected_kl)
    if values.cross_entropy_m is not None:
        errors["cross-entropy"] = error(values.cross_entropy_m, expected_ce)
    if with_gradient:
        errors["gradient"] = error(s, expected_gradient)
        errors["row of weight 0"] = s[5].abs().max().item()
    else:
        errors["student overwritten"] = float(not torch.equal(s, before))
    errors["teacher overwritten"] = float(not torch.equal(t, teacher_before))
    room = s.as_strided((n, vocabulary + 11), s.stride())
    errors["padding overwritten"] = float(not room[:, vocabulary:].isnan().all())
    return errors


def check(errors: dict[str, float], dtype: torch.dtype, expected: set[str]) -> None:
    assert expected <= errors.keys()
    for name, found in errors.items():
        exactly = name not in ("kl", "cross-entropy", "gradient")
        # Half precision rounds the logits and the gradient; the values are of the rounded logits.
        tolerance = TOLERANCE[dtype] if name == "gradient" else 1e-5
        assert found <= (0 if exactly else tolerance), (name, found)


def head(kl_over: str, dtype: torch.dtype, backend: Backend, num_labels: int) -> tuple[Tensor, ...]:
    """Return (loss, sums, gradients of hidden states, weight, bias) for 13 positions."""
    student, teacher = projections(13, 8, 150, dtype, DEVICE)
    labels = torch.arange(num_labels, device=DEVICE) * 29
    labels[3:4] = -100
    terms = [kl_term(1.0, temperature=TEMPERATURE, over=kl_over), mlm_term(1.0)]
    coefficients = torch.tensor([0.7, 1.3], device=DEVICE)
    loss, sums = vocabulary_losses(student, teacher, labels, terms, coefficients, backend=backend)
    loss.backward()
    gradients = [tensor.grad for tensor in student]
    return tuple(x.detach().double().cpu() for x in (loss, sums, *gradients))


def head_errors(kl_over: str, dtype: torch.dtype, num_labels: int, chunk: int) -> list[float]:
    """Return the errors of the head with the kernel, compared with plain torch in fp64."""
    from pretrain.kernels.head import vocabulary

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(vocabulary.CHUNK, DEVICE, chunk)
        found = head(kl_over, dtype, "triton", num_labels)
        expected = head(kl_over, torch.float64, "torch", num_labels)
    return [error(x, y) for x, y in zip(found, expected, strict=True)]
