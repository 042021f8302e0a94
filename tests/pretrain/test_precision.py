"""Check `precision: auto` and the default of `micro_batch_size`, when chosen and when resumed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import rank_work, ranks
from support.results import recorded
from support.said import Said

from pretrain import RunError
from pretrain.config import RunConfig, with_defaults
from pretrain.device.precision import choose
from pretrain.train import train

Settings = Callable[..., dict[str, Any]]
Machine = Callable[[str | None], None]
CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
AMX = "vendor_id : GenuineIntel\nflags : fpu avx512f avx512_bf16 amx_bf16 avx512_fp16 amx_tile\n"
OLD = "vendor_id : GenuineIntel\nflags : fpu avx512f avx512_bf16\n"
CPUS = {
    "Intel with AMX": (AMX, "bf16"),
    "Intel with AVX512-BF16 alone": (OLD, "fp32"),
    "AMD with AVX512-BF16": ("vendor_id : AuthenticAMD\nflags : avx512f avx512_bf16\n", "bf16"),
    "AMD without": ("vendor_id : AuthenticAMD\nflags : avx2 avx512f avx512_vnni\n", "fp32"),
    "ARM": ("processor : 0\nFeatures : fp asimd bf16 sve\n", "fp32"),
    "unreadable": (None, "fp32"),
}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Return a function that makes this process read another /proc/cpuinfo, or none."""

    def set_cpuinfo(text: str | None) -> None:
        file = tmp_path / "cpuinfo"
        file.unlink(missing_ok=True)
        if text is not None:
            file.write_text(text, encoding="utf-8")
        monkeypatch.setattr("pretrain.kernels.products.CPUINFO", file)

    return set_cpuinfo


@pytest.fixture
def settings(make_settings: Settings) -> Settings:
    """Return 4 steps of 8 rows in the default precision, without the key `micro_batch_size`."""
    heads = {"num_attention_heads": 4, "num_hidden_layers": 1}
    return make_settings(
        objective={"name": "mlm"},
        model={"hidden_size": 32, "intermediate_size": 64, **heads},
        train={"max_steps": 4, "global_batch_size": 8, "precision": "auto"},
    )


def run(values: dict[str, Any], **arguments: Any) -> Said:
    said = Said()
    train(RunConfig.model_validate(values), progress=said, **arguments)
    return said


@pytest.mark.parametrize(("cpuinfo", "expected"), CPUS.values(), ids=CPUS)
def test_auto_on_a_cpu_follows_its_flags(
    cpuinfo: str | None, expected: str, machine: Machine
) -> None:
    machine(cpuinfo)
    assert choose(CPU)[0] == expected


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((6, 1), "fp32"),
        ((7, 0), "fp16"),
        ((7, 5), "fp16"),
        ((8, 0), "bf16"),
        ((8, 9), "bf16"),
        ((9, 0), "bf16"),
        ((12, 0), "bf16"),
    ],
    ids=str,
)
def test_auto_on_a_gpu_follows_its_compute_capability(
    capability: tuple[int, int], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    assert choose(GPU)[0] == expected
    assert f"a GPU, compute capability {capability[0]}.{capability[1]}" == choose(GPU)[1]


def test_a_resume_keeps_the_recorded_precision_and_reports_it(
    settings: Settings, machine: Machine
) -> None:
    whole, halves = settings("whole"), settings("halves")
    machine(AMX)
    assert run(whole).precision == ["precision auto: bf16 (CPU with AMX)"]
    assert recorded(whole)["precision"] == "bf16"
    run(halves, stop_after=2)
    machine(OLD)
    said = run(halves)
    assert said.precision == [
        "precision auto: bf16, as in the checkpoint; this machine would choose fp32 (CPU without "
        "AMX or AMD's AVX512-BF16)"
    ]
    assert any("4 steps" in line and ", bf16 on cpu" in line for line in said.lines)
    assert recorded(halves)["precision"] == "bf16"
    assert ranks.digests(Path(halves["output"]), 4) == ranks.digests(Path(whole["output"]), 4)


def test_auto_continues_the_given_precision_and_another_is_refused(
    settings: Settings, machine: Machine
) -> None:
    machine(AMX)
    run(settings(precision="fp32"), stop_after=2)
    with pytest.raises(RunError, match=r"train\.precision was fp32 and is now bf16"):
        run(settings(precision="bf16"), stop_after=3)
    assert run(settings(precision="auto")).precision == [
        "precision auto: fp32, as in the checkpoint; this machine would choose bf16 (CPU with AMX)"
    ]


def test_ranks_that_choose_different_precisions_are_refused(
    settings: Settings, tmp_path: Path
) -> None:
    for rank, text in enumerate((AMX, OLD)):
        (tmp_path / f"cpuinfo.{rank}").write_text(text, encoding="utf-8")
    values = settings(global_batch_size=16)
    ranks.run(2, rank_work.on_machines, values, tmp_path / "cpuinfo", tmp_path / "answer")
    for rank in range(2):
        kind, message = json.loads((tmp_path / f"answer.{rank}").read_text())
        assert kind == "RunError"
        assert message == (
            "rank 1 has a different choice for train.precision auto from rank 0: the machines "
            "differ: set train.precision, to fp32 for instance"
        )


def test_the_default_micro_batch_is_auto_on_a_gpu_and_eight_rows_elsewhere(
    settings: Settings,
) -> None:
    config = RunConfig.model_validate(settings())
    assert config.train.precision == "auto"
    assert with_defaults(config, "cuda", 2).train.micro_batch_size == "auto"
    assert with_defaults(config, "cpu", 1).train.micro_batch_size == 8
    for rows, processes, expected in ((4, 1, 4), (12, 1, 6), (12, 3, 4), (7, 1, 7), (22, 1, 2)):
        other = RunConfig.model_validate(settings(global_batch_size=rows))
        assert with_defaults(other, "cpu", processes).train.micro_batch_size == expected
    own = RunConfig.model_validate(settings(micro_batch_size=2))
    assert with_defaults(own, "cuda", 2).train.micro_batch_size == 2
    run(settings(), stop_after=1)
    assert recorded(settings())["micro_batch_size"] == 8
