"""Check the parameter checksum, the loss spike detector and the post-mortem."""

import json
import math
import random
import re
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pretrain.data.hashing import mix, root
from pretrain.distributed.agreement import differing, parameter_checksum
from pretrain.monitor.metrics import SpikeDetector
from pretrain.monitor.post_mortem import post_mortem

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHAPES = ((300, 1000), (7,), (64, 64), (), (64, 64), (33, 5))  # the first takes several chunks


def parameters(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def flip(parameter: Tensor, bit: int) -> None:
    """Change a bit of the parameter's memory."""
    data = parameter.reshape(-1).view(torch.uint8).numpy()
    data[bit // 8] ^= np.uint8(1 << bit % 8)


def test_the_checksum_is_a_sum_of_bits_times_odd_weights() -> None:
    """Compute it element by element in Python's integers."""
    ours = [torch.randn(2**17 + 3), torch.tensor([float("nan"), -0.0])]
    expected, chunk = 0, 0
    for parameter in ours:
        bits = struct.unpack(f"<{len(parameter)}i", parameter.numpy().tobytes())
        for start in range(0, len(bits), 2**17):
            chunk += 1
            for i, value in enumerate(bits[start : start + 2**17]):
                expected += value * (2 * mix(i) + 1) * (2 * root(0, 4, chunk) + 1)
    found = parameter_checksum(ours)
    assert (found.dtype, found.shape) == (torch.int64, ())
    assert int(found) % 2**64 == expected % 2**64


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_flipped_bit_changes_the_checksum_wherever_it_is(dtype: torch.dtype) -> None:
    ours = parameters(dtype)
    before = int(parameter_checksum(ours))
    draw = random.Random(1)
    for trial in range(200):
        parameter = ours[trial % len(ours)]
        bit = draw.randrange(8 * parameter.nbytes)
        flip(parameter, bit)
        assert int(parameter_checksum(ours)) != before
        flip(parameter, bit)
    assert int(parameter_checksum(ours)) == before


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_bit_of_one_element_counts(dtype: torch.dtype) -> None:
    """Check that no bit is lost: the sign of zero, the payload of a NaN, the last bit."""
    ours = [torch.zeros(3, dtype=dtype)]
    seen = {int(parameter_checksum(ours))}
    bits = 8 * ours[0].element_size()
    for bit in range(bits):
        flip(ours[0], bit)
        seen.add(int(parameter_checksum(ours)))
        flip(ours[0], bit)
    assert len(seen) == bits + 1


def test_the_order_of_parameters_and_of_elements_counts() -> None:
    ours = parameters()
    swapped = [*ours]
    swapped[2], swapped[4] = swapped[4], swapped[2]
    assert swapped[2].shape == swapped[4].shape
    assert int(parameter_checksum(swapped)) != int(parameter_checksum(ours))
    long = torch.randn(2**18)
    for i, j in ((0, 1), (5, 2**17 + 5), (0, 2**18 - 1)):  # within a chunk and across
        other = long.clone()
        other[i], other[j] = long[j], long[i]
        assert int(parameter_checksum([other])) != int(parameter_checksum([long]))


def test_threads_and_memory_layout_do_not_change_the_parameter_checksum(one_thread: None) -> None:
    ours = parameters()
    alone = int(parameter_checksum(ours))
    torch.set_num_threads(3)
    assert int(parameter_checksum(ours)) == alone
    strided = [p.t().contiguous().t() if p.dim() == 2 else p for p in ours]
    assert not strided[0].is_contiguous()
    assert int(parameter_checksum(strided)) == alone
    # Gradients are not recorded.
    assert int(parameter_checksum(torch.nn.ParameterList(ours))) == alone
    assert int(parameter_checksum([])) == 0


class Watch(TorchDispatchMode):
    """Record the size of every tensor that is made and every value that is read back."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.reads = 0, 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        self.reads += "_local_scalar_dense" in str(function)
        if isinstance(result, Tensor) and not function.is_view:
            self.largest = max(self.largest, result.numel() * result.element_size())
        return result


def test_the_checksum_reads_nothing_back_and_takes_little_memory() -> None:
    large = torch.randn(4_000_000)
    with Watch() as watch:
        found = parameter_checksum([large])
    assert watch.reads == 0 and 0 < watch.largest <= 2**20 < 4 * large.numel()
    with Watch() as watch:
        int(found)
    assert watch.reads == 1  # the watch sees it when it happens


@pytest.mark.parametrize(
    ("values", "ranks"),
    [
        ([5], []),
        ([5, 5, 5, 5], []),
        ([5, 5, 6, 5], [2]),
        ([-1, 5, 5], [0]),
        ([5, 6], [0, 1]),
        ([5, 5, 6, 6], [0, 1, 2, 3]),
        ([5, 6, 7], [0, 1, 2]),
        ([5, 7, 5, 6], [1, 3]),
    ],
)
def test_the_ranks_outside_the_majority_are_named(values: list[int], ranks: list[int]) -> None:
    assert differing(values) == ranks


def curve(function: Callable[[int], float], noise: float, seed: int) -> Iterator[float]:
    draw = random.Random(seed)
    step = 0
    while True:
        yield function(step) * (1 + draw.gauss(0, noise))
        step += 1


def watch(losses: Iterator[float], steps: int, spikes: SpikeDetector | None = None) -> list[str]:
    spikes = spikes or SpikeDetector()
    return [line for step in range(steps) for line in spikes.warnings(step, next(losses), 1.0)]


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))]
)
def test_ten_thousand_noisy_steps_raise_no_alarm(seed: int) -> None:
    """Draw a falling loss, and gradient norms that scatter by a third."""
    losses = curve(lambda step: 2 + 8 * math.exp(-step / 400), 0.03, seed)
    draw = random.Random(100 + seed)
    spikes = SpikeDetector()
    for step in range(10_000):
        assert spikes.warnings(step, next(losses), math.exp(draw.gauss(0, 0.33))) == []


def test_a_spike_warning_has_its_numbers() -> None:
    """Draw half the values as 1 and half as 3: mean 2, deviation 1."""
    close, spike = SpikeDetector(), SpikeDetector()
    for step in range(1, 129):
        for spikes in (close, spike):
            assert spikes.warnings(step, 1 + 2 * (step % 2), 2.0) == []
    assert close.warnings(129, 7.9, 19.9) == []  # 5.9 deviations, 9.95 times
    assert spike.warnings(129, 8.5, 21.0) == [
        "step 129: the loss is 8.5, 6.5 deviations above 2, its mean over the last 128 steps",
        "step 129: the gradient norm is 21, 10.5 times 2, its median over the last 128 steps",
    ]


def test_a_spike_does_not_hide_the_next() -> None:
    """Follow a spike of 1,000, which in full would set the limit of 128 steps above 500."""
    spikes = SpikeDetector()
    calm = curve(lambda _: 2.0, 0.02, 3)
    watch(calm, 128, spikes)
    assert len(spikes.warnings(128, 1000.0, 1.0)) == 1
    assert [spikes.warnings(step, next(calm), 1.0) for step in range(129, 165)] == [[]] * 36
    (line,) = spikes.warnings(165, 4.0, 1.0)
    assert line.startswith("step 165: the loss is 4, ")


def test_a_warning_of_a_kind_comes_at_most_every_32_steps() -> None:
    spikes = SpikeDetector()
    watch(curve(lambda _: 2.0, 0.02, 4), 128, spikes)
    told = [
        (step, line.split(" is ")[0])
        for step in range(128, 228)
        for line in spikes.warnings(step, 10.0 * 3 ** (step - 128), 50.0 if step >= 140 else 1.0)
    ]
    norm = [step for step, line in told if "norm" in line]
    loss = [step for step, line in told if "loss" in line]
    assert loss == [128, 160, 192, 224]  # a loss that triples each step never becomes usual
    assert norm == [140, 172]  # until half the window is of that size


@pytest.mark.parametrize("seed", range(5))
def test_a_slow_rise_is_no_spike(seed: int) -> None:
    assert watch(curve(lambda step: 2 + step / 500, 0.02, seed), 2000) == []
    assert watch(curve(lambda step: 2 + step / 500, 0.0, seed), 2000) == []


@pytest.mark.parametrize("seed", range(5))
def test_a_new_level_is_warned_of_once_and_then_accepted(seed: int) -> None:
    said = watch(curve(lambda step: 2 if step < 300 else 3, 0.02, seed), 2000)
    assert len(said) == 1 and said[0].startswith("step 300: ")
    drop = watch(curve(lambda step: 3 if step < 300 else 2, 0.02, seed), 2000)
    assert drop == []
    tenfold = watch(curve(lambda step: 2 if step < 300 else 20, 0.02, seed), 2000)
    assert 1 <= len(tenfold) <= 2


def test_rounding_of_a_flat_curve_is_no_spike() -> None:
    assert watch(curve(lambda _: 2.0, 1e-5, 5), 3000) == []
    flat = SpikeDetector()
    assert watch(iter([2.0] * 100), 100, flat) == []
    assert flat.warnings(100, 2.011, 1.0) == []
    (line,) = flat.warnings(101, 2.013, 1.0)  # 6.5 times a thousandth of 2, nearly
    assert "deviations above 2" in line
    assert watch(iter([0.0] * 100), 100) == []


def test_nothing_is_judged_before_32_values() -> None:
    for known, expected in ((31, 0), (32, 2)):
        spikes = SpikeDetector()
        watch(curve(lambda _: 2.0, 0.02, 6), known, spikes)
        assert len(spikes.warnings(known, 100.0, 100.0)) == expected


def test_values_that_are_not_finite_give_no_warning() -> None:
    """Give infinite norms, which fp16 reports whenever its scale was too high."""
    ours, plain = SpikeDetector(), SpikeDetector()
    values = curve(lambda _: 2.0, 0.02, 7)
    for step in range(128):
        value = next(values)
        assert ours.warnings(step, math.nan, math.inf) == []
        assert ours.warnings(step, math.inf, math.nan) == []
        assert ours.warnings(step, value, 1.0) == plain.warnings(step, value, 1.0) == []
    assert ours.warnings(500, 2.5, 11.0) == plain.warnings(500, 2.5, 11.0) != []
    idle = SpikeDetector()
    for step in range(64):
        assert idle.warnings(step, 0.0, 0.0) == []
    assert all("norm" not in line for line in idle.warnings(64, 1.0, 1.0))  # no times of nothing


NAN, INF = math.nan, math.inf


# Loss, kl and mlm of three micro-batches on each of two ranks; one of rank 0 and two of rank 1 are
# not finite.
BAD = [
    [[1.0, 3.0, 4.0], [INF, INF, 5.0], [1.0, 3.0, 4.0]],
    [[NAN, NAN, 6.0], [2.0, 3.0, 4.0], [-INF, 7.0, -INF]],
]
ROWS = [10, 11, 12, 13, 14, 15, 20, 21, 22, 23, 24, 25]


def told(values: Any = BAD, rows: list[int] = ROWS, **changes: Any) -> tuple[dict[str, Any], str]:
    facts: dict[str, Any] = {
        "step": 812,
        "grad_norm": NAN,
        "learning_rate": 5e-4,
        "loss_scale": None,
        "last_metrics": {"kind": "train", "step": 810, "loss": 3.25, "grad_norm": INF},
        "shards": "shards/books",
        "file": "runs/one/post_mortem.json",
    }
    return post_mortem(facts | changes, rows, values, ["kl", "mlm"])


def test_the_micro_batches_whose_loss_is_not_finite_are_found() -> None:
    found = told()[0]["micro_batches"]
    assert [(c["rank"], c["micro_batch"], c["rows"]) for c in found] == [
        (0, 1, [12, 13]),
        (1, 0, [20, 21]),
        (1, 2, [24, 25]),
    ]
    assert found[0]["loss"] == "inf" and found[0]["terms"] == {"kl": "inf", "mlm": 5.0}
    assert found[2]["loss"] == "-inf" and found[2]["terms"] == {"kl": 7.0, "mlm": "-inf"}


def test_the_post_mortem_has_step_ranks_rows_and_remedies() -> None:
    report, message = told()
    strict = json.loads(json.dumps(report, allow_nan=False))
    assert strict == report
    assert list(report) == [
        *("step", "what", "ranks", "rows", "micro_batches", "grad_norm", "learning_rate"),
        *("loss_scale", "last_metrics", "shards", "file", "remedies"),
    ]
    assert (report["step"], report["what"], report["ranks"]) == (812, "loss is inf", [0, 1])
    assert report["rows"] == [12, 13, 20, 21, 24, 25]
    assert report["micro_batches"][1] == {
        "rank": 1,
        "micro_batch": 0,
        "rows": [20, 21],
        "loss": "nan",
        "terms": {"kl": "nan", "mlm": 6.0},
    }
    assert report["micro_batches"][2]["terms"] == {"kl": 7.0, "mlm": "-inf"}
    assert (report["grad_norm"], report["learning_rate"]) == ("nan", 5e-4)
    assert report["loss_scale"] is None
    last = {"kind": "train", "step": 810, "loss": 3.25, "grad_norm": "inf"}
    assert report["last_metrics"] == last
    assert report["shards"] == "shards/books"
    assert report["file"] == "runs/one/post_mortem.json"
    assert len(report["remedies"]) == 4
    assert "\n" not in message
    for part in (
        "step 812: the loss is inf over rows 12, 13, 20, 21, 24, 25 of ranks 0, 1 (shards/books)",
        "the update was not made",
        "runs/one/post_mortem.json",
        "lower optimizer.learning_rate",
        "distil inspect shards/books --row 12",
        "--skip-rows 12:13",
        "train.skip_non_finite",
    ):
        assert part in message, part


def test_a_non_finite_gradient_names_every_row_of_its_step() -> None:
    report, message = told([[[0.5, 1.0, 1.0]] * 2], list(range(20)), grad_norm=INF, loss_scale=1.0)
    assert (report["what"], report["ranks"]) == ("gradient norm is inf", [])
    assert report["rows"] == list(range(20)) and report["micro_batches"] == []
    assert report["loss_scale"] == 1.0
    shown = ", ".join(map(str, range(16)))
    assert f"step 812: the gradient norm is inf over rows {shown}, ... (shards/books)" in message


def test_a_post_mortem_before_the_first_entry_has_no_metrics() -> None:
    report, message = told([[[1.0] * 3] * 3, BAD[1]], step=1, last_metrics=None)
    assert report["last_metrics"] is None and report["ranks"] == [1]
    assert re.search(r"step 1: the loss is nan over rows \d+, .* of rank 1 .* not made", message)
