"""Compare a run on a GPU with the same on the CPU or with the formula: `make test-gpu`.

Tests of kernels lie next to those for the CPU: `grep -rl mark.gpu tests` lists all files.
"""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from support import rank_work, ranks
from support.results import losses, recorded, state
from support.tiny import save_teacher, tiny_bert
from torch import Tensor, nn

from launch.self_check import checks
from pretrain.checkpoint.snapshot import Snapshot
from pretrain.config import RunConfig
from pretrain.contracts.batch import send
from pretrain.device.gpu import check_kernels
from pretrain.device.precision import allow_tf32, choose
from pretrain.distributed.parallel import DDP
from pretrain.distributed.processes import build_accelerator, start_ranks
from pretrain.train import train

pytestmark = pytest.mark.gpu
Make = Callable[..., Any]
Settings = Callable[..., dict[str, Any]]
GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reset what Accelerate and TF32 keep for the whole process."""
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.set_float32_matmul_precision("highest")


@pytest.fixture
def settings(tmp_path: Path, make_settings: Settings) -> Settings:
    """Return 6 steps of 16 rows with the triple loss, without dropout; heads of width 16."""
    save_teacher(tmp_path / "teacher", tiny_bert(2, width=64))
    return make_settings(
        tmp_path / "teacher",
        student={"num_layers": 1, "dropout": 0.0, "attention_dropout": 0.0},
        optimizer={"learning_rate": 1e-4},
        train={"max_steps": 6, "global_batch_size": 16, "precision": "auto"},
        checkpoint={"every": 0},
    )


def made(values: dict[str, Any], **arguments: Any) -> dict[int, float]:
    """Return the losses by step of a run made, or continued, in this process."""
    train(RunConfig.model_validate(values), **arguments)
    return losses(values)


def on_cpu(values: dict[str, Any]) -> dict[int, float]:
    """Return the losses of a process that sees no GPU."""
    ranks.run(1, rank_work.once, values, environment={"CUDA_VISIBLE_DEVICES": ""})
    return losses(values)


# Start


def test_this_torch_has_kernels_for_this_gpu() -> None:
    check_kernels(GPU)
    assert torch.ones(3, device=GPU).add(1).sum().item() == 6


def test_an_unlaunched_process_names_its_gpu(settings: Settings) -> None:
    config = RunConfig.model_validate(settings())
    with start_ranks(config) as started:
        assert started.device == torch.device("cuda", torch.cuda.current_device())


def test_defaults_are_chosen_and_recorded(settings: Settings) -> None:
    values = settings()
    assert all(math.isfinite(loss) for loss in made(values).values())
    assert recorded(values)["precision"] == choose(GPU)[0]
    rows = recorded(values)["micro_batch_size"]
    assert rows == 16, "16 tiny rows fit every GPU"
    record = state(values, 6)["micro_batch"]
    assert record["rows"] == rows and record["device"] == torch.cuda.get_device_name(GPU)


def test_tf32_is_for_fp32_alone() -> None:
    if torch.cuda.get_device_capability(GPU) < (8, 0):
        pytest.skip("TF32 needs compute capability 8.0")
    a, b = (torch.randn(512, 512, device=GPU, generator=drawn(i)) for i in (0, 1))
    exact = a.double() @ b.double()

    def error() -> float:
        return float(((a @ b).double() - exact).norm() / exact.norm())

    assert error() < 1e-6
    allow_tf32(GPU)
    assert 1e-5 < error() < 1e-2


def drawn(seed: int) -> torch.Generator:
    return torch.Generator(GPU).manual_seed(seed)


# A run


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("fp32", 1e-3), ("bf16", 2e-2), ("fp16", 2e-2)]
)
def test_a_run_has_the_cpus_curve(settings: Settings, precision: str, tolerance: float) -> None:
    if precision == "bf16" and torch.cuda.get_device_capability(GPU) < (8, 0):
        pytest.skip("bf16 needs compute capability 8.0")
    expected = on_cpu(settings("cpu", precision="fp32", micro_batch_size=4))
    found = made(settings("gpu", precision=precision, micro_batch_size=4))
    assert len(expected) == 6 and len(found) >= (3 if precision == "fp16" else 6)
    assert found == pytest.approx({step: expected[step] for step in found}, rel=tolerance)
    assert torch.get_float32_matmul_precision() == ("high" if precision == "fp32" else "highest")


def test_every_objective_and_family_has_the_cpus_curve() -> None:
    for check in checks():
        assert not check.failed, check


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_run_continues_with_its_moments_and_loss_scale(
    settings: Settings, precision: str
) -> None:
    whole, halves = (settings(name, precision=precision, micro_batch_size=8) for name in "ab")
    expected = made(whole)
    made(halves, stop_after=3)
    assert made(halves) == pytest.approx(expected, rel=1e-3)
    assert (state(halves, 6)["scaler"] is None) == (precision == "fp32")


def test_loader_workers_start_beside_a_gpu(settings: Settings) -> None:
    values = [settings(f"{n}", micro_batch_size=8, precision="fp32", num_workers=n) for n in (0, 2)]
    assert made(values[1]) == pytest.approx(made(values[0]), rel=1e-4)


# fp16's loss scale, with the fused optimizer


class Linear(nn.Module):
    """Use a weight as the parameter of a `Distillation` that returns (loss, sums)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, coefficients: Tensor) -> tuple[Tensor, Tensor]:
        loss = (self.weight * x).sum() * coefficients.sum()
        return loss, loss.detach().reshape(1)


def test_an_overflow_leaves_the_step_out_and_halves_the_scale(settings: Settings) -> None:
    config = RunConfig.model_validate(settings(precision="fp16"))
    with start_ranks(config):
        accelerator = build_accelerator(config)
    module = Linear().to(GPU)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)
    parallel = DDP(accelerator, module, optimizer, config)

    def gradient_step(size: float) -> float:
        x, one = torch.full((4,), size, device=GPU), torch.ones(1, device=GPU)
        loss, _ = parallel.model(x, one)
        accelerator.backward(loss)
        return float(parallel.clip(1.0))

    before = module.weight.detach().clone()
    assert parallel.loss_scale == 65536
    assert not math.isfinite(gradient_step(math.inf))
    parallel.step(0.1)
    assert torch.equal(module.weight, before) and parallel.loss_scale == 32768
    moments = parallel.save(dict(module.named_parameters())).optimizer
    assert not moments or moments["weight/step"].item() == 0
    assert gradient_step(3.0) == pytest.approx(6.0, rel=1e-5)
    parallel.step(0.1)
    assert not torch.equal(module.weight, before)
    assert parallel.save(dict(module.named_parameters())).optimizer["weight/step"].item() == 1
    assert gradient_step(math.nan) != 0
    parallel.discard()
    assert parallel.loss_scale == 16384 and module.weight.grad is None
    scaler = json.loads(json.dumps(parallel.save(dict(module.named_parameters())).scaler))
    parallel.load(dict(module.named_parameters()), {}, {**scaler, "scale": 1024.0})
    assert parallel.loss_scale == 1024


# Copies


def busy(seconds: float = 0.05) -> None:
    """Give the GPU work that lasts longer than the call."""
    torch.cuda._sleep(int(seconds * 1.5e9))


def test_what_is_sent_may_be_overwritten_at_once() -> None:
    for dtype in (torch.uint16, torch.int16, torch.int32, torch.float32):
        host = torch.arange(1000).to(dtype)
        expected = host.clone()
        busy()
        there = send(host, GPU)
        host.zero_()
        assert there.device == GPU and torch.equal(there.cpu(), expected)


def test_a_snapshot_is_of_the_moment_it_was_taken() -> None:
    tensors = {name: torch.full((1000,), float(i), device=GPU) for i, name in enumerate("ab")}
    tensors["tied"] = tensors["a"]
    snapshot = Snapshot()
    for offset in (10.0, 20.0):
        busy()
        for tensor in (tensors["a"], tensors["b"]):
            tensor.add_(10)
        taken = snapshot.take(tensors, tied=True)
        for tensor in (tensors["a"], tensors["b"]):
            tensor.add_(1).sub_(1)
        assert all(tensor.is_cpu and tensor.is_pinned() for tensor in taken.values())
        assert taken["tied"] is taken["a"]
        assert [taken[name][0].item() for name in "ab"] == [offset, offset + 1]


# Memory


def test_a_trial_leaves_nothing_behind_and_is_believed(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that `auto` within a limit finds fewer rows than fit the GPU and trains with them."""
    auto, number = settings("auto", precision="fp32"), settings("number", precision="fp32")
    found = made(auto)
    number["train"]["micro_batch_size"] = recorded(auto)["micro_batch_size"]
    assert found == pytest.approx(made(number), rel=1e-4)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(GPU).total_memory
    limit = torch.cuda.memory_reserved(GPU) + 600 * 2**20
    large = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 8}
    tight = {**settings("tight", global_batch_size=4096, max_steps=1), "model": large}
    tight |= {"objective": {"name": "mlm"}}
    del tight["teacher"], tight["student"]
    torch.cuda.set_per_process_memory_fraction(limit / total, GPU)
    try:
        assert math.isfinite(made(tight)[1])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, GPU)
    assert 1 <= recorded(tight)["micro_batch_size"] < 4096


# Processes


def test_nccl_has_the_time_limit_and_trains(settings: Settings, tmp_path: Path) -> None:
    """Start a rank for each GPU, at most two: one rank is a world for NCCL."""
    world = min(2, torch.cuda.device_count())
    values = settings("nccl", precision="fp32", micro_batch_size=4)
    environment = {"DISTIL_TIMEOUT": "77", "NCCL_SOCKET_IFNAME": "lo"}
    file = tmp_path / "seen"
    ranks.run(world, rank_work.on_nccl, values, file, environment=environment)
    for rank in range(world):
        seen = json.loads(file.with_suffix(f".{rank}").read_text(encoding="utf-8"))
        assert seen == {"backend": "nccl", "timeout": 77.0, "device": f"cuda:{rank}"}
    expected = made(settings("alone", precision="fp32", micro_batch_size=4))
    assert losses(values) == pytest.approx(expected, rel=1e-4)


@ranks.needs_deepspeed
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_zero_has_the_same_curve(settings: Settings, precision: str) -> None:
    values = settings("zero", precision=precision, micro_batch_size=4)
    environment = {**ranks.zero(1), "DS_ACCELERATOR": "cuda"}
    ranks.run(1, rank_work.once, values, environment=environment)
    expected = made(settings("alone", precision="fp32", micro_batch_size=4))
    found = losses(values)
    assert len(found) >= 3
    assert found == pytest.approx({step: expected[step] for step in found}, rel=2e-2)
