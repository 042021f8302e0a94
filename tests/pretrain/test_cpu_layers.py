"""Compare CPU layers with fp64 and with torch's, and check the numbers of dropout."""

import copy
import re
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from support.batches import terms_of
from support.operators import Operators
from support.tiny import tiny_bert, tiny_distilbert
from torch import Tensor, nn

from benchmarks.baselines import twin
from pretrain.kernels.cpu_layers import (
    Dropout,
    Linear,
    draw,
    drop_levels,
    have_product,
    use_cpu_layers,
    use_torch_layers,
)
from pretrain.kernels.head.vocabulary import Projection
from pretrain.kernels.products import ONEDNN, using
from pretrain.model.distillation import Distillation
from pretrain.objectives.distilbert import DistilBert

with using("onednn"):
    HAVE_ONEDNN = have_product("forward", torch.zeros(1, 1), torch.zeros(1, 1))
needs_onednn = pytest.mark.skipif(not HAVE_ONEDNN, reason="oneDNN's products are for x86")


@pytest.fixture(autouse=True)
def _the_same_library_on_every_processor() -> Iterator[None]:
    with using("mixed"):
        yield


def layers(*, width: int = 48, out: int = 80, bias: bool = True) -> tuple[nn.Linear, nn.Linear]:
    """Return torch's layer and ours with the same weights."""
    torch.manual_seed(0)
    theirs = nn.Linear(width, out, bias=bias)
    ours = copy.deepcopy(theirs)
    use_cpu_layers(ours)
    assert type(ours) is Linear
    return theirs, ours


def relative(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double(), expected.detach()
    return float((found - expected).abs().max() / expected.abs().max())


# Linear


@needs_onednn
@pytest.mark.parametrize("library", ONEDNN)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 48), (2, 5, 48), (1, 48), (48,), (2, 0, 48)])
def test_a_linear_layer_in_fp64(shape: tuple[int, ...], bias: bool, library: str) -> None:
    """Compare output and gradients of each choice with fp64: no larger an error than torch's."""
    theirs, ours = layers(bias=bias)
    torch.manual_seed(1)
    input, grad = torch.randn(shape), torch.randn(*shape[:-1], 80)

    def made(layer: nn.Linear, dtype: torch.dtype) -> list[Tensor]:
        x = input.to(dtype).requires_grad_()
        y = layer(x)
        assert y.shape == grad.shape and y.dtype == dtype
        return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], grad.to(dtype))]

    with using(library):
        found = made(ours, torch.float32)
    expected = made(copy.deepcopy(theirs).double(), torch.float64)
    assert len(found) == 3 + bias
    for mine, exact in zip(found, expected, strict=True):
        assert mine.shape == exact.shape
        assert not exact.numel() or relative(mine, exact) < 1e-6 or not exact.any()


@needs_onednn
def test_inputs_and_gradients_need_not_be_contiguous() -> None:
    theirs, ours = layers()
    x = torch.randn(48, 6).t()  # transposed
    results = []
    for layer in (theirs, ours):
        leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
        assert not leaf.is_contiguous()
        layer(leaf).sum().backward()  # a gradient of one number, expanded
        results.append([leaf.grad, layer.weight.grad, layer.bias.grad])
    for mine, exact in zip(*reversed(results), strict=True):
        assert relative(mine, exact.double()) < 1e-6


@needs_onednn
@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # torch's, on setting any flag of oneDNN
def test_onednn_computes_fp32_products() -> None:
    """Check oneDNN in fp32, forward and backward, with gradient and without; torch otherwise."""
    _, layer = layers()
    x = torch.randn(3, 48, requires_grad=True)
    name = "mkldnn._linear_pointwise.default"
    with Operators() as called:
        layer(x).sum().backward()
    assert called.names.count(name) == 2
    for context in (torch.no_grad(), torch.inference_mode()):
        with Operators() as called, context:
            layer(x)
        assert called.names == [name]
    with Operators() as called, torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert name not in called.names
    with Operators() as called, torch.backends.mkldnn.flags(enabled=False):
        layer(x)
    assert name not in called.names
    layer.double()
    with Operators() as called:
        layer(x.double())
    assert name not in called.names


@needs_onednn
@pytest.mark.parametrize(
    ("library", "times"), [("mkl", 0), ("head", 0), ("mixed", 2), ("onednn", 3)]
)
def test_each_kind_of_product_has_its_library(library: str, times: int) -> None:
    """Count a layer's products forward and backward, then the logits of a head."""
    _, layer = layers()
    x = torch.randn(3, 48, requires_grad=True)
    name = "mkldnn._linear_pointwise.default"
    with using(library):
        with Operators() as called:
            layer(x).sum().backward()
        assert called.names.count(name) == times
        head = Projection(x.detach(), layer.weight.detach(), layer.bias.detach())
        with Operators() as called:
            logits = head.logits(slice(None), None)
        assert called.names.count(name) == (library != "mkl")
    assert relative(logits, F.linear(*(t.double() for t in head))) < 1e-6


def test_errors_are_torch_s_own() -> None:
    """Check errors that name shapes and dtypes."""
    for theirs, input in (
        (nn.Linear(8, 3), torch.ones(2, 9)),
        (nn.Linear(8, 3), torch.ones(2, 8, dtype=torch.float64)),
        (nn.Linear(8, 3), torch.ones(())),
    ):
        ours = copy.deepcopy(theirs)
        use_cpu_layers(ours)
        with pytest.raises(RuntimeError) as expected:
            theirs(input)
        with pytest.raises(RuntimeError, match=f"^{re.escape(str(expected.value))}$"):
            ours(input)
    empty = Linear(0, 3)
    assert torch.equal(empty(torch.ones(2, 0)), empty.bias.expand(2, 3))


def test_frozen_weights_get_no_gradient() -> None:
    _, layer = layers()
    layer.requires_grad_(False)
    x = torch.randn(3, 48, requires_grad=True)
    layer(x).sum().backward()
    assert layer.weight.grad is None and x.grad is not None
    assert relative(x.grad, layer.weight.double().sum(0).expand(3, 48)) < 1e-6


def test_models_keep_parameters_names_and_results() -> None:
    """Check also that the baseline's copy has torch's layers with the same parameters."""
    student, teacher = tiny_distilbert(), tiny_bert()
    before = {name: id(tensor) for name, tensor in student.named_parameters()}
    plain = copy.deepcopy(student)
    Distillation(student, teacher, terms_of(DistilBert()), pad_id=0)
    assert {name: id(tensor) for name, tensor in student.named_parameters()} == before
    for model in (student, teacher):
        types = [type(module) for module in model.modules()]
        assert Linear in types and Dropout in types
        assert nn.Linear not in types and nn.Dropout not in types
    ids = torch.randint(5, 200, (2, 9))
    assert relative(student(ids).logits, plain(ids).logits.double()) < 1e-6
    other = twin(student)
    types = [type(module) for module in other.modules()]
    assert nn.Linear in types and Linear not in types and Dropout not in types
    assert {name: id(tensor) for name, tensor in other.named_parameters()} == before
    assert Linear in [type(module) for module in student.modules()]
    use_torch_layers(student)
    assert [type(m) for m in student.modules()] == [type(m) for m in plain.modules()]


# Dropout


def test_dropout_has_torch_s_distribution() -> None:
    """Check 0 or x / (1 - p) with the input as mean, its gradient, and evaluation."""
    layer = nn.Dropout(0.1)
    use_cpu_layers(layer)
    assert type(layer) is Dropout
    torch.manual_seed(0)
    x = torch.randn(300, 1001).requires_grad_()  # an odd number, no multiple of four
    y = layer(x)
    kept = y != 0
    scale = 1 / (1 - drop_levels(0.1) / 2**15)
    assert torch.equal(y, torch.where(kept, x * scale, 0))
    share = float(kept.double().mean())
    assert abs(share - 0.9) < 5 * (0.09 / x.numel()) ** 0.5
    for axis in (0, 1):  # no row and no column is different
        n = x.shape[axis]
        errors = (kept.double().mean(axis) - 0.9) / (0.09 / n) ** 0.5
        assert errors.abs().max() < 5.5
    y.sum().backward()
    assert torch.equal(x.grad, torch.where(kept, scale, 0.0))
    assert torch.equal(layer.eval()(x), x)


def test_dropout_follows_torch_s_generator() -> None:
    layer, x = Dropout(0.5), torch.ones(1000)
    torch.manual_seed(4)
    first, second = layer(x), layer(x)
    torch.manual_seed(4)
    assert torch.equal(layer(x), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize(("p", "value"), [(0.0, 1.0), (1.0, 0.0)])
def test_dropout_of_0_and_1_draws_nothing(p: float, value: float) -> None:
    before = torch.get_rng_state()
    assert torch.equal(Dropout(p)(torch.ones(5)), torch.full((5,), value))
    assert p == 1 or torch.equal(torch.get_rng_state(), before)


def test_dropout_on_other_devices_is_torch_s() -> None:
    x = torch.ones(1000, device="meta")
    with Operators() as called:
        assert Dropout(0.5)(x).device.type == "meta"
    expected = Operators()
    with expected:
        F.dropout(x, 0.5)
    assert called.names == expected.names


@pytest.mark.parametrize("dropout", [0.05, 0.1, 0.5, 0.9])
def test_the_rate_of_dropping(dropout: float) -> None:
    """Check the share dropped, in each of the four numbers of a word."""
    levels = drop_levels(dropout)
    rate = levels / 2**15
    assert abs(rate - dropout) < 2e-5
    torch.manual_seed(0)
    dropped = (draw(4, 512 * 512, levels) < 0).flatten()
    for lane in range(4):
        here = dropped[lane::4].double()
        assert abs(float(here.mean()) - rate) < 5 * (rate * (1 - rate) / len(here)) ** 0.5
    # Neighbours know nothing of one another.
    both = (dropped[1:] & dropped[:-1]).double()
    assert abs(float(both.mean()) - rate**2) < 5 * (rate**2 * (1 - rate**2) / len(both)) ** 0.5


def test_all_numbers_are_equally_likely() -> None:
    """Compute chi-squared over 64 bins, each of the four numbers of a word for itself."""
    torch.manual_seed(0)
    numbers = draw(1, 512 * 512, 0).flatten().long()
    assert int(numbers.min()) >= 0 and int(numbers.max()) < 2**15
    for lane in range(4):
        counts = torch.bincount(numbers[lane::4] >> 9, minlength=64).double()
        expected = counts.sum() / 64
        assert float(((counts - expected) ** 2 / expected).sum()) < 63 + 5 * (2 * 63) ** 0.5
