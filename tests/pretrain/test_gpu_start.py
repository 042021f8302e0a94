"""Check the start on a GPU without one: only the driver's calls are stubbed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState

from pretrain import RunError
from pretrain.config import RunConfig
from pretrain.device.memory import Memory
from pretrain.device.micro_batch import gpu_memory
from pretrain.distributed.processes import build_accelerator, start_ranks

Patch = pytest.MonkeyPatch
Capability = tuple[int, int]
GB = 2**30
WHEEL = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]  # of PyPI, torch 2.11 and later
CUDA_126 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stub one GPU of 80 GB, of which 79 are free, in a process without a launcher."""

    class Runtime:
        cudaMemGetInfo = staticmethod(lambda device: (79 * GB, 80 * GB))

    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda.memory, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getMemoryFraction", lambda index: 0.5, raising=False)
    stub_kernels(monkeypatch, "NVIDIA A100-SXM4-80GB", (8, 0), WHEEL)
    reset()
    yield
    reset()


def reset() -> None:
    AcceleratorState._reset_state()
    PartialState._reset_state()


def stub_kernels(monkeypatch: Patch, name: str, capability: Capability, archs: list[str]) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: archs)


def config(tmp_path: Path, **train: Any) -> RunConfig:
    values = {"output": tmp_path / "out", "shards": tmp_path, "teacher": "t", "train": train}
    return RunConfig.model_validate(values)


def test_an_unlaunched_process_knows_which_gpu_it_has(tmp_path: Path) -> None:
    with start_ranks(config(tmp_path)) as started:
        device = started.device
    assert device == torch.device("cuda", 0)
    assert gpu_memory(device) == Memory(80 * GB, 40 * GB)


@pytest.mark.parametrize(("precision", "expected"), [("fp32", "high"), ("fp16", "highest")])
def test_fp32_runs_in_tf32(tmp_path: Path, precision: str, expected: str) -> None:
    assert torch.get_float32_matmul_precision() == "highest"
    try:
        with start_ranks(config(tmp_path, precision=precision)):
            build_accelerator(config(tmp_path, precision=precision))
        assert torch.get_float32_matmul_precision() == expected
    finally:
        torch.set_float32_matmul_precision("highest")


def test_accelerate_use_cpu_keeps_the_run_off_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with start_ranks(config(tmp_path)) as started:
        assert started.device == torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "capability", "archs"),
    [
        ("Tesla V100-SXM2-16GB", (7, 0), WHEEL),
        ("Tesla P100-PCIE-16GB", (6, 0), WHEEL),
        ("NVIDIA A100", (8, 0), ["sm_86", "sm_90"]),  # a later minor version's kernels
        ("NVIDIA B200", (10, 0), CUDA_126),
        ("NVIDIA GB10", (12, 1), ["sm_90a", "compute_90a"]),  # "a": for that capability alone
    ],
    ids=["V100", "P100", "A100", "B200", "GB10"],
)
def test_a_gpu_without_kernels_is_refused_at_the_start(
    name: str, capability: Capability, archs: list[str], tmp_path: Path, monkeypatch: Patch
) -> None:
    stub_kernels(monkeypatch, name, capability, archs)
    with pytest.raises(RunError) as refused, start_ranks(config(tmp_path)):
        pass
    text = str(refused.value)
    assert "\n" not in text
    number = f"{capability[0]}.{capability[1]}"
    for part in (name, f"compute capability {number}", " ".join(archs), "pip install", "/whl/cu"):
        assert part in text
    assert ("cu126" in text) == (capability < (7, 5))


@pytest.mark.parametrize(
    ("capability", "archs"),
    [
        ((7, 0), CUDA_126),
        ((8, 6), ["sm_80"]),  # the same major version, a later minor one
        ((8, 9), WHEEL),
        ((12, 1), WHEEL),
        ((12, 0), ["sm_90", "compute_90"]),  # PTX is compiled for what comes later
        ((9, 0), ["sm_90a"]),
        ((10, 3), ["sm_100f"]),  # "f": for the family
        ((8, 0), []),  # it does not say
    ],
    ids=str,
)
def test_a_gpu_with_kernels_is_taken(
    capability: Capability, archs: list[str], tmp_path: Path, monkeypatch: Patch
) -> None:
    stub_kernels(monkeypatch, "a GPU", capability, archs)
    with start_ranks(config(tmp_path)):
        pass
