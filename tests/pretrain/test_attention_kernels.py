"""Compare attention within documents with plain formulas, with gradients and dropout."""

from importlib import import_module
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.attention import (
    BOUNDS,
    SCALE,
    attended,
    compare,
    inputs,
    naive,
    packing,
    relative,
    with_gradients,
)
from support.operators import Operators
from torch import Tensor

from pretrain.contracts.packing import Packing, find_documents
from pretrain.kernels.attention import attend as attend_packed
from pretrain.kernels.attention import cpu
from pretrain.kernels.attention.cpu import by_document
from pretrain.kernels.attention.dispatch import flash, masked, memory_efficient, usable
from pretrain.kernels.cpu_layers import draw, drop_levels
from pretrain.tasks.mlm.examples import masked_batch

PRECISIONS = pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)


@PRECISIONS
@pytest.mark.parametrize("attend", [by_document, masked])
def test_output_and_gradients_are_those_of_the_formula(
    attend: Any, dtype: torch.dtype, bound: float
) -> None:
    tensors = inputs(dtype=dtype)
    found = attended(tensors, attend=attend)
    assert {t.dtype for t in found} == {dtype}
    compare(found, tensors, bound)


@PRECISIONS
@pytest.mark.parametrize("window", [1, 4, 23])
def test_a_window_limits_the_distance(window: int, dtype: torch.dtype, bound: float) -> None:
    tensors = inputs(dtype=dtype)
    assert usable(tensors[0].device, dtype, 8, window) == [masked]
    compare(attended(tensors, attend=masked, window=window), tensors, bound, window=window)


@PRECISIONS
def test_dropout_matches_the_formula_with_the_same_numbers(
    dtype: torch.dtype, bound: float
) -> None:
    """Draw the same numbers again to know what was kept."""
    tensors, levels = inputs(dtype=dtype), drop_levels(0.3)
    torch.manual_seed(3)
    found = attended(tensors, 0.3)
    torch.manual_seed(3)
    lengths = [b - a for a, b in pairwise(BOUNDS) if b > a]
    kept = [draw(3, n * n, levels).view(3, n, n) >= 0 for n in lengths]
    compare(found, tensors, bound, kept, 1 - levels / 2**15)


def test_a_common_part_of_all_keys_costs_no_precision() -> None:
    """Add a vector to all keys: probabilities do not change, but scores in bf16 do."""
    tensors = inputs(heads=2, width=16, dtype=torch.bfloat16)
    tensors[1] = (tensors[1] + 16).detach()
    tensors[0] = (tensors[0] + 1).detach()
    exact = naive([t.detach().double() for t in tensors])
    found = by_document(tuple(tensors[:3]), packing(), 0.0, SCALE)
    assert relative(found.detach(), exact) < 2e-2
    q, k, v = (t[0, 0, 13:].detach() for t in tensors[:3])
    plain = (q @ k.T * SCALE).softmax(-1) @ v
    assert relative(plain, exact[0, 13:, 0]) > 5e-2


@PRECISIONS
@pytest.mark.parametrize("window", [None, 2])
def test_the_dense_kernel_takes_short_documents_apart(
    dtype: torch.dtype, bound: float, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count the scores: of documents of 5 tokens and none, not of rows."""
    seams = [0, 5, 5, 8, 13, 18, 20, 24, 29, 33, 38, 43, 48, 48]
    monkeypatch.setattr("support.attention.BOUNDS", seams)
    monkeypatch.setattr("support.attention.LONGEST", 5)
    masks, sdpa = [], torch.nn.functional.scaled_dot_product_attention

    def seen(*tensors: Tensor, attn_mask: Tensor, **more: Any) -> Tensor:
        masks.append(attn_mask.shape)
        return sdpa(*tensors, attn_mask=attn_mask, **more)

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", seen)
    tensors = inputs(dtype=dtype)
    found = attended(tensors, attend=masked, window=window)
    assert masks == [(13, 1, 1 if window is None else 5, 5)]
    compare(found, tensors, bound, window=window)


# Dropout


def test_the_same_state_of_the_generator_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check it for several numbers of heads at a time, which depends on the threads."""
    tensors = inputs()
    torch.manual_seed(1)
    found = attended(tensors, 0.1)
    after = torch.get_rng_state()
    other = attended(tensors, 0.1)
    torch.manual_seed(1)
    again = attended(tensors, 0.1)
    assert torch.equal(torch.get_rng_state(), after)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    assert not torch.equal(found[0], other[0])
    monkeypatch.setattr(cpu, "_BYTES_PER_THREAD", 1)
    torch.manual_seed(1)
    apart = attended(tensors, 0.1)
    assert torch.equal(torch.get_rng_state(), after)
    assert all(relative(a, b) < 1e-12 for a, b in zip(apart, found, strict=True))


def test_without_dropout_nothing_is_drawn() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        before = torch.get_rng_state()
        by_document(tuple(inputs(dtype=dtype)[:3]), packing(), 0.0, SCALE)
        assert torch.equal(torch.get_rng_state(), before)


def test_the_mean_over_dropout_is_the_output_without_dropout() -> None:
    q, k, v, _ = (t.detach() for t in inputs(heads=2, width=4, dtype=torch.float32))
    torch.manual_seed(0)
    several = (q, k, v), packing()
    drawn = torch.stack([by_document(*several, 0.1, SCALE) for _ in range(500)]).double()
    exact = by_document(*several, 0.0, SCALE)
    error = (drawn.mean(0) - exact) / (drawn.std(0) / 500**0.5)
    assert error.abs().max() < 5
    assert 0.8 < float(error.std()) < 1.2  # the bound is not a loose one


@pytest.mark.parametrize("dropout", [1e-7, 0.9999999])
def test_dropout_rates_near_0_and_1_stay_finite(dropout: float) -> None:
    assert all(t.isfinite().all() for t in attended(inputs(), dropout))


def test_nan_in_the_input_is_nan_in_the_output() -> None:
    """Check that a NaN reaches the output also where it is dropped."""
    tensors = inputs()
    with torch.no_grad():
        tensors[0][0, 1, 10] = float("nan")
    torch.manual_seed(0)
    output, *grads = attended(tensors, 0.5)
    expected = torch.zeros(2, 24, 3, dtype=torch.bool)
    expected[0, 10, 1] = True
    assert (output.isnan().all(-1) == expected).all() and not output[~expected].isnan().any()
    assert all(grad.isnan().any() for grad in grads)


# Precision


def test_autocast_computes_in_half_precision_as_sdpa_does() -> None:
    tensors = inputs(dtype=torch.float32)

    def attend(dropout: float) -> Tensor:
        query, key, value = (t.transpose(1, 2).flatten(2) for t in tensors[:3])
        query = query * (SCALE * 8**0.5)  # ours divides by the root of the head width
        return attend_packed(query, key, value, packing(), 3, dropout).unflatten(2, (3, 8))

    with torch.autocast("cpu", torch.bfloat16):
        half, dropped = attend(0.0), attend(0.5)
        plain = masked(tuple(tensors[:3]), packing(), 0.0, SCALE)
    assert half.dtype == dropped.dtype == plain.dtype == torch.bfloat16
    found = with_gradients(half, tensors)
    assert {t.dtype for t in found[1:]} == {torch.float32}
    with torch.autocast("cpu", torch.bfloat16):
        inside = with_gradients(dropped, tensors)  # backward in an autocast region, too
    assert all(t.isfinite().all() for t in inside)
    compare(found, tensors, 2e-2)


# Kernels of GPUs


def test_a_gpu_kernel_gets_heads_of_a_multiple_of_8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check zeros, scale and cut with `masked` in its place; a GPU runs the kernel itself."""
    module, widths = import_module("pretrain.kernels.attention.dispatch"), []

    def kernel(qkv: Any, *others: Any) -> Tensor:
        widths.append(qkv[0].shape[-1])
        return masked(qkv, *others)

    monkeypatch.setattr(module, "flash", kernel)
    monkeypatch.setattr(module, "usable", lambda *_: [kernel])
    for width, padded in ((26, 32), (3, 8), (64, 64)):
        tensors = inputs(width=width)
        query = tensors[0] * (SCALE * width**0.5)  # the formula's scale is not that of this width
        flat = (t.transpose(1, 2).flatten(2) for t in (query, *tensors[1:3]))
        output = module.attend(*flat, packing(), 3, 0.0).unflatten(2, (3, width))
        compare(with_gradients(output, tensors), tensors, 1e-12)
        assert widths.pop() == padded


def test_which_kernel_is_used_where() -> None:
    def names(device: str, dtype: torch.dtype, width: int = 64, *more: Any) -> list[str]:
        return [b.__name__ for b in usable(torch.device(device), dtype, width, *more)]

    assert names("cpu", torch.bfloat16) == names("cpu", torch.float32) == ["by_document", "masked"]
    assert names("meta", torch.bfloat16) == ["flash", "memory_efficient", "masked"]
    assert names("meta", torch.float32) == ["memory_efficient", "masked"]
    assert names("meta", torch.float64) == ["masked"]
    assert names("meta", torch.bfloat16, 20) == ["flash", "memory_efficient", "masked"]
    assert names("mps", torch.float16) == ["masked"]
    assert names("cpu", torch.float32, 64, 64) == ["masked"]
    assert names("meta", torch.bfloat16, 64, 64) == ["flash", "masked"]
    assert names("meta", torch.float32, 64, 64) == ["masked"]
    assert names("meta", torch.bfloat16, 64, None, 0.1) == ["flash", "masked"]
    assert names("meta", torch.float32, 64, None, 0.1) == ["masked"]


@pytest.mark.parametrize(
    ("capability", "dtype", "first"),
    [
        ((9, 0), torch.bfloat16, flash),
        ((8, 0), torch.float16, flash),
        ((8, 0), torch.float32, memory_efficient),
        ((7, 0), torch.float16, memory_efficient),
        ((7, 0), torch.float32, memory_efficient),
        ((7, 0), torch.bfloat16, masked),
    ],
)
def test_which_kernel_is_used_on_which_gpu(
    capability: tuple[int, int], dtype: torch.dtype, first: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert usable(torch.device("cuda"), dtype, 64)[0] is first


def test_the_operators_take_these_arguments() -> None:
    """Check shapes and dtypes of forward and backward on the meta device."""
    tensors = [t.detach().to("meta").requires_grad_() for t in inputs(dtype=torch.bfloat16)]
    for attend, dropout in ((flash, 0.1), (memory_efficient, 0.0)):
        output = attend(tuple(tensors[:3]), packing("meta"), dropout, SCALE)
        assert output.shape == (2, 24, 3, 8) and output.dtype == torch.bfloat16
        assert output.requires_grad
    for window in (None, 4):
        for grad in attended(tensors, 0.1, flash, window)[1:]:
            assert grad.shape == (2, 3, 24, 8) and grad.dtype == torch.bfloat16


def test_memory_is_taken_for_the_real_documents() -> None:
    """Record what the kernels get for 9 documents of at most 20 tokens in two rows of 64."""
    ids = torch.full((2, 64), 9)
    ids.view(-1)[[0, 20, 30, 48, 64, 80, 100, 119]] = 2
    ids[1, 60:] = 0  # padding, which counts as a document
    nothing = torch.zeros(2, 0, dtype=torch.int64)
    batch = masked_batch(ids, nothing, nothing, cls_id=2, pad_id=0)
    packing = find_documents(ids, batch.cu_seqlens, batch.max_length, pad_id=0)
    *tensors, longest = packing
    packing = Packing(*(t.to("meta") for t in tensors), longest)
    for dtype, name in ((torch.bfloat16, "flash"), (torch.float32, "efficient")):
        q = torch.zeros(2, 64, 24, dtype=dtype, device="meta")
        with Operators() as called:
            attend_packed(q, q, q, packing, 3, 0.1 if name == "flash" else 0.0)
        (call,) = (call for call in called.calls if f"aten._{name}_attention_f" in call.name)
        first = call.name.startswith("aten._efficient")  # it has an argument more, a bias
        bounds, *lengths = (call.args[i + first] for i in (3, 5, 6))
        assert bounds.shape == (10,) and lengths == [20, 20]
        if first:  # 9 documents, 3 heads, and 20 rounded up
            assert call.result[1].shape == (9, 3, 32)
