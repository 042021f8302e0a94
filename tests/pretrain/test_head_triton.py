"""Compare the Triton kernel with the formulas in fp64, on a GPU or interpreted."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support.head_inputs import draw
from support.head_kernels import (
    DEVICE,
    DTYPES,
    ON_GPU,
    SIZES,
    TEMPERATURE,
    TOLERANCE,
    check,
    exact,
    head,
    head_errors,
    kernel_errors,
    needs_triton,
    tile,
)

from pretrain import RunError
from pretrain.kernels import triton_support
from pretrain.kernels.head.closed_form import Weights

Call = Callable[..., Any]


@pytest.fixture(scope="module")
def call() -> Iterator[Call]:
    """Return a function that calls one of this module where the kernel runs.

    Triton reads TRITON_INTERPRET when it is imported, and the kernels of a GPU need it
    unset: so the call is made in another process.
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
    with pytest.raises(RunError, match=r"tensors are on cpu; use a GPU of compute capability 7\.0"):
        use_triton("triton", hidden)
    with pytest.raises(RunError, match="fp64; give fp32, bf16 or fp16"):
        use_triton("triton", hidden.double())
    assert not use_triton("auto", hidden)
    assert not use_triton("torch", hidden)


@pytest.mark.parametrize(
    ("capability", "dtype", "fits"),
    [
        ((6, 1), torch.float32, False),
        ((7, 0), torch.float16, True),
        ((7, 5), torch.float32, True),
        ((7, 5), torch.bfloat16, False),
        ((8, 0), torch.bfloat16, True),
        ((9, 0), torch.float64, False),
    ],
)
def test_old_gpus_run_it_in_fp16_and_fp32(
    capability: tuple[int, int], dtype: torch.dtype, fits: bool
) -> None:
    assert (triton_support.unfit_for(capability, dtype) is None) == fits


def compare_tiles(dtype: torch.dtype, wrong: float) -> str | None:
    """Compare the kernels with plain torch, as before their first use on an old GPU."""
    from pretrain.kernels.head import triton_kernel

    with pytest.MonkeyPatch.context() as patch:
        right = triton_kernel.losses_and_gradient

        def changed(student: Any, *others: Any, **more: Any) -> Any:
            values = right(student, *others, **more)
            student[0, 0] *= 1 + wrong
            return values

        # As many tokens per step as on a GPU: two steps, the second not full.
        patch.setattr(triton_kernel, "NUM_WARPS", 16)
        patch.setattr(triton_kernel, "WORDS_PER_THREAD", 8)
        patch.setattr(triton_kernel, "losses_and_gradient", changed)
        triton_support.compared.cache_clear()
        return triton_support.compared(torch.device(DEVICE), dtype)


@needs_triton
def test_a_kernel_that_computes_something_else_is_not_used(call: Call) -> None:
    """Compare tiles of both kernels, right ones and one with a wrong number of 240,000."""
    assert call(compare_tiles, torch.float16, 0.0) is None
    differs = call(compare_tiles, torch.float32, 1e5)
    assert "Triton's kernels differ from plain torch by" in differs


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # as if it were not installed
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    triton_support.missing.cache_clear()
    with pytest.raises(RunError, match="the package triton is not installed; pip install triton"):
        triton_support.use_triton("triton", torch.zeros(2))
    triton_support.missing.cache_clear()


@needs_triton
@pytest.mark.parametrize(
    ("capability", "dtype", "vocabulary"),
    [
        (70, torch.float16, 30522),
        (90, torch.bfloat16, 250_002),
        (120, torch.float32, 30522),
        # The others name no other instruction: three cover each dtype and vocabulary.
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (70, torch.float32, 250_002),
                (75, torch.float16, 250_002),
                (75, torch.float32, 30522),
                (80, torch.bfloat16, 30522),
                (80, torch.float16, 30522),
                (90, torch.float32, 30522),
                (100, torch.bfloat16, 30522),
                (120, torch.bfloat16, 250_002),
            )
        ),
    ],
    ids=str,
)
def test_compiles_for_gpus(
    capability: int,
    dtype: torch.dtype,
    vocabulary: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
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
    # As the head's are: a row is a multiple of 64 long.
    wide = -(-vocabulary // 64) * 64
    tiles = [torch.empty(8, wide, dtype=dtype)[:, :vocabulary] for _ in range(2)]
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
