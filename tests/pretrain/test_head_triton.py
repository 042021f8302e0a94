"""Compare the Triton kernel with the formulas in fp64, on a GPU or interpreted."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.head_inputs import draw, projections
from torch import Tensor

from pretrain import RunError
from pretrain.kernels.head import Backend, triton_support, vocabulary_losses
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

Call = Callable[..., Any]


@pytest.fixture(scope="module")
def call() -> Iterator[Call]:
    """Return a function that calls one of this module where the kernel runs.

    Triton reads TRITON_INTERPRET when it is imported, and other users of Triton in this process
    (torch.compile) need it unset: so the call is made in another process.
    """
    if ON_GPU:
        yield lambda work, *arguments: work(*arguments)
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        spawn = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(1, mp_context=spawn, initializer=_narrow_programs)
        assert pool.submit(os.getenv, "TRITON_INTERPRET").result() == "1"  # it runs from here on
    with pool:
        yield lambda work, *arguments: pool.submit(work, *arguments).result()


def _narrow_programs() -> None:
    """Take 64 tokens per step instead of 4,096: small vocabularies have several and a rest."""
    from pretrain.kernels.head import triton_kernel

    torch.set_num_threads(1)
    triton_kernel.NUM_WARPS = 1
    triton_kernel.WORDS_PER_THREAD = 2


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


@needs_triton
@pytest.mark.parametrize(
    ("dtype", "vocabulary"),
    [*[(torch.float32, size) for size in SIZES], (torch.bfloat16, 200), (torch.float16, 200)],
)
def test_values_and_gradient(call: Call, dtype: torch.dtype, vocabulary: int) -> None:
    errors = call(kernel_errors, dtype, vocabulary, True, True, True)
    check(errors, dtype, {"kl", "cross-entropy", "gradient"})


@needs_triton
@pytest.mark.parametrize("with_gradient", [True, False])
@pytest.mark.parametrize(("kl", "ce"), [(True, True), (True, False), (False, True)])
def test_a_term_alone_and_no_gradient(call: Call, kl: bool, ce: bool, with_gradient: bool) -> None:
    errors = call(kernel_errors, torch.float32, 150, kl, ce, with_gradient)
    there = {"kl": kl, "cross-entropy": ce, "gradient": with_gradient}
    check(errors, torch.float32, {name for name, wanted in there.items() if wanted})
    assert ("kl" in errors, "cross-entropy" in errors) == (kl, ce)


def similar_logits(distance: float) -> tuple[float, float, float]:
    """Return (true KL, absolute error, gradient's error) of a student close to its teacher."""
    from pretrain.kernels.head.triton_kernel import losses_and_gradient

    t = tile(3 * draw(0, 4, 300), torch.float32, 0)
    s = tile(t.double().cpu() + distance * draw(1, 4, 300) + 5 * (distance > 0), t.dtype, 0)
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    weights = Weights(torch.ones(4, device=DEVICE), None)
    kl, _, gradient = exact(s, t, none, weights)
    values = losses_and_gradient(s, t, none, weights, temperature=TEMPERATURE, with_gradient=True)
    assert values.kl_n is not None
    absolute = (values.kl_n.double().cpu() - kl).abs().max().item()
    return kl.mean().item(), absolute, (s.double().cpu() - gradient).abs().max().item()


@needs_triton
def test_similar_logits(call: Call) -> None:
    """Check the error after cancellation: 1e-6 T^2, a thousandth of a KL of T^2 1e-3."""
    for distance in (0.1, 0.03, 0.01):
        kl, absolute, _ = call(similar_logits, distance)
        assert kl < 0.02 and absolute < 1e-6 * TEMPERATURE**2
    kl, absolute, gradient = call(similar_logits, 0.0)
    assert kl < 1e-12 and absolute < 1e-12 and gradient < 2e-7


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


@needs_triton
@DTYPES
@pytest.mark.parametrize("chunk", [4, 512])
def test_the_triton_head_equals_full_logits(call: Call, dtype: torch.dtype, chunk: int) -> None:
    """Check chunks with labels everywhere, at the beginning, and nowhere."""
    assert max(call(head_errors, "tokens", dtype, 6, chunk)) <= TOLERANCE[dtype]


@needs_triton
def test_head_with_kl_over_masked_positions_or_no_labels(call: Call) -> None:
    """Check positions of weight 0, and a micro-batch in which nothing is masked."""
    assert max(call(head_errors, "masked", torch.float32, 6, 4)) <= 1e-5
    loss, sums, *_ = call(head, "tokens", torch.float32, "triton", 0)
    assert sums[1] == 0 and loss == pytest.approx(0.7 * sums[0].item())


def test_what_cannot_run_is_refused() -> None:
    use_triton, hidden = triton_support.use_triton, torch.zeros(2, 3)
    with pytest.raises(RunError, match=r"tensors are on cpu; use a GPU of compute capability 8\.0"):
        use_triton("triton", hidden)
    with pytest.raises(RunError, match="fp64; give fp32, bf16 or fp16"):
        use_triton("triton", hidden.double())
    assert not use_triton("auto", hidden)
    assert not use_triton("torch", hidden)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # as if it were not installed
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    triton_support._missing.cache_clear()
    with pytest.raises(RunError, match="the package triton is not installed; pip install triton"):
        triton_support.use_triton("triton", torch.zeros(2))
    triton_support._missing.cache_clear()


@needs_triton
@pytest.mark.parametrize("capability", [80, 90])
@DTYPES
def test_compiles_for_gpus(
    capability: int, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check 16-byte loads and stores, no register spilled, two programs a multiprocessor."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from pretrain.kernels.head import triton_kernel as kernel

    class Driver:
        get_current_target = staticmethod(lambda: GPUTarget("cuda", capability, 32))
        get_current_device = staticmethod(lambda: capability)  # compiled kernels are kept by it
        get_current_stream = staticmethod(lambda device: 0)

    class CompileOnly:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            return lambda *args, **more: made.append(row.warmup(*args, grid=grid, **more))

    made: list[Any] = []
    row = kernel._row
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", Driver())
    monkeypatch.setattr(kernel, "_row", CompileOnly())
    tiles = [torch.empty(8, 30528, dtype=dtype)[:, :30522] for _ in range(2)]  # as the head's are
    weights, labels = Weights(torch.ones(8), torch.ones(3)), torch.zeros(3, dtype=torch.int64)
    kernel.losses_and_gradient(*tiles, labels, weights, temperature=2.0, with_gradient=True)
    assert len(made) == 2  # rows with a label, and without
    for compiled in made:
        assert "ld.global.v4.b32" in compiled.asm["ptx"] and "st.global.v4" in compiled.asm["ptx"]
        binary = tmp_path / "row.cubin"
        binary.write_bytes(compiled.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", binary]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert " STACK:0 " in report and " LOCAL:0 " in report, report
        assert int(report.split(" REG:")[1].split()[0]) <= 64, report
