"""Check what `distil bench` measures, prints, writes and refuses."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.tiny import save_teacher

from pretrain.bench import machine
from pretrain.model.families import FAMILIES

Distil = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parents[2]
TINY = ["--layers", "2", "--width", "32", "--row-length", "16", "--micro-batch", "2"]


@pytest.fixture(autouse=True)
def _short_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the peak be of smaller products: each measurement takes half a second else."""
    monkeypatch.setitem(machine._SIZES, "cpu", 256)


def assert_refused(ended: tuple[int, str, str], *parts: str) -> None:
    code, _, err = ended
    assert code == 2 and len(err.strip().splitlines()) == 1, err
    assert all(part in err for part in parts), err


def assert_whole(step: dict[str, Any], *more: str) -> None:
    for name in ("milliseconds", "fastest", "slowest", "tokens_per_second", *more):
        assert step[name] > 0, name
    assert step["fastest"] <= step["milliseconds"] <= step["slowest"]


def test_synthetic_models_are_measured_without_files(
    tmp_path: Path, distil: Distil, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "figures" / "bench.json"
    monkeypatch.chdir(tmp_path)
    options = ("--repeats", 1, "--precision", "fp32", "--kl", "masked", "--json", file)
    code, out, err = distil("bench", "--synthetic", *TINY, "--documents", *options)
    assert code == 0, out + err
    assert "fp32 masked 2" in out and "usual" in out
    (stated,) = re.findall(r"peak: .* ([0-9.]+) GFLOP/s \(fp32\)", out)
    text = file.read_text(encoding="utf-8")
    assert str(ROOT) not in text and str(tmp_path) not in text and os.uname().nodename not in text
    report = json.loads(text)
    assert report["hardware"]["device"] == "cpu" and report["versions"]["torch"]
    [agreement] = report["agreement"]
    assert 0 <= agreement["term"] < 1e-5 and 0 < agreement["gradient"] < 1e-4
    assert float(stated) == pytest.approx(report["peak_flops"]["fp32"] / 1e9, rel=0.01)
    [row] = report["rows"]
    assert (row["precision"], row["kl"], row["micro_batch"], row["tokens"]) == (
        *("fp32", "masked", 2),
        32,
    )
    for name in ("ours", "usual", "careful"):
        step = row["steps"][name]
        assert_whole(step, "of_peak", "peak_bytes", "above_trunk_bytes")
        assert step["of_peak"] <= 1 and f" {step['milliseconds']:.3g}"[:3] in out
        assert name == "ours" or (step["ratio"] > 0 and step["above_trunk_share"] > 0)
    assert [cell["layout"] for cell in report["documents"]] == ["article", "paragraph"]
    for cell in report["documents"]:
        assert cell["promised"] == cell["fills"]["packed"] / cell["fills"]["padded"]
        for name in ("ours packed", "ours padded", "ours full", "usual padded"):
            assert_whole(cell["steps"][name])
            if name != "ours packed":
                assert cell[f"against {name}"]["kept"] > 0


@pytest.fixture
def config(tmp_path: Path, corpus: Path) -> Path:
    save_teacher(tmp_path / "teacher")
    values = {
        "output": str(tmp_path / "run"),
        "shards": str(corpus),
        "teacher": str(tmp_path / "teacher"),
        "objective": {"temperature": 3.0, "kl_positions": "masked"},
        "train": {"precision": "bf16", "micro_batch_size": 4, "global_batch_size": 8},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return tmp_path / "run.yaml"


@pytest.mark.parametrize("precision", ["bf16", "auto"])
def test_a_config_is_measured_as_it_trains(
    precision: str, tmp_path: Path, config: Path, distil: Distil, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text("flags : amx_bf16 amx_tile\n", encoding="utf-8")
    monkeypatch.setattr("pretrain.kernels.products.CPUINFO", tmp_path / "cpuinfo")
    changes = f"train.precision={precision}", "student.num_layers=1"
    file = tmp_path / "bench.json"
    options = ("--documents", "--repeats", 1, "--json", file)
    code, out, err = distil("bench", config, *changes, *options)
    assert code == 0, out + err
    report = json.loads(file.read_text(encoding="utf-8"))
    [row], [documents] = report["rows"], report["documents"]
    assert (row["precision"], row["kl"], row["micro_batch"]) == ("bf16", "masked", 4)
    assert "4 -> 1 layers" in report["what"]
    assert documents["layout"] == "these shards"
    assert 0 < documents["fills"]["padded"] < documents["fills"]["packed"] <= 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--precision", "fp16"], ["--precision fp16", "GPU"]),
        (["--precision", "int8"], ["--precision int8", "bf16"]),
        (["--kl", "some"], ["--kl some", "masked"]),
        (["--micro-batch", "0"], ["--micro-batch 0"]),
        (["--width", "100000", "--layers", "2"], ["--width 100000", "multiple of 64"]),
        (["nowhere.yaml"], ["nowhere.yaml", "no such file"]),
        (["nowhere.yaml", "--width", "128"], ["--width", "nowhere.yaml", "--synthetic"]),
        (["shipped:minilm-6x384.yaml", "--kl", "all"], ["--kl all", "objective minilm"]),
    ],
)
def test_mistakes_are_reported_in_one_line(
    distil: Distil, monkeypatch: pytest.MonkeyPatch, arguments: list[str], parts: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_refused(distil("bench", *arguments), *parts)


def test_an_unwritable_file_is_refused_before_anything_is_measured(
    tmp_path: Path, distil: Distil
) -> None:
    ended = distil("bench", "--synthetic", *TINY, "--json", tmp_path)
    assert_refused(ended, str(tmp_path), "directory")
    assert "measuring" not in ended[1] and "the same function" not in ended[1]


@pytest.mark.parametrize("name", ["mlm", "minilm"])
def test_other_objectives_are_measured(
    name: str, tmp_path: Path, config: Path, distil: Distil
) -> None:
    values = yaml.safe_load(config.read_text(encoding="utf-8"))
    values["train"]["precision"] = "fp32"
    values["objective"] = {"name": name} | ({"relation_heads": 8} if name == "minilm" else {})
    if name == "mlm":
        sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
        sizes |= {"intermediate_size": 64, "max_position_embeddings": 64}
        values |= {"teacher": None, "model": sizes}
    config.write_text(yaml.safe_dump(values), encoding="utf-8")
    code, out, err = distil("bench", config, "--repeats", 1, "--json", tmp_path / "bench.json")
    assert code == 0, out + err
    report = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    [row], [agreement] = report["rows"], report["agreement"]
    assert "KL over" not in out and 0 < agreement["gradient"] < 1e-4
    assert row["steps"]["usual"]["ratio"] > 0 and row["steps"]["careful"]["ratio"] > 0
    assert (row["steps"]["ours"]["of_peak"] is None) == (name == "minilm")


def shipped(*, task: bool) -> list[str]:
    """Return the names of the configs of runs, on a task or not; others are of corpora, recipes."""
    loaded = {
        path.name: yaml.safe_load(path.read_text()) for path in (ROOT / "configs").glob("*.yaml")
    }
    return sorted(
        name for name, values in loaded.items() if "shards" in values and ("task" in values) == task
    )


def test_a_run_on_a_task_is_not_measured(distil: Distil) -> None:
    for name in shipped(task=True):
        code, _, err = distil("bench", ROOT / "configs" / name, "--synthetic")
        assert code == 2 and "measures runs on text" in err, name


@pytest.mark.slow
@pytest.mark.parametrize("name", shipped(task=False))
def test_a_shipped_config_is_measured_with_random_weights(
    name: str, tmp_path: Path, distil: Distil, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    width = ["--layers", 12, "--width", 192, "--row-length", 16, "--micro-batch", 2]
    options = ("--synthetic", *width, "--repeats", 1, "--precision", "fp32")
    code, out, err = distil("bench", ROOT / "configs" / name, *options)
    assert code == 0, out + err
    assert "the same function" in out and "random weights" in out


def test_a_synthetic_teacher_has_the_sizes_of_its_config(tmp_path: Path, distil: Distil) -> None:
    """Take a family with other special ids, positions and names of sizes; no weights are there."""
    family, pad = FAMILIES["modernbert"], 7
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 48, "vocab_size": 210, "max_position_embeddings": 24}
    family.new_config(sizes, {"pad": pad, "cls": 101, "sep": 102}).save_pretrained(tmp_path / "t")
    values = {"output": "run", "shards": "none", "teacher": str(tmp_path / "t")}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    options = ("--micro-batch", 2, "--repeats", 1, "--precision", "fp32")
    code, out, err = distil("bench", tmp_path / "run.yaml", "--synthetic", *options)
    assert code == 0, out + err
    assert "4 -> 2 layers x 32, 210 words" in out and "rows of 24 tokens" in out
    assert "cannot be read" not in out


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"shards": "nowhere"}, ["nowhere"]),
        ({"train": {"micro_batch_size": 10**6}}, ["1000000", "rows"]),
    ],
)
def test_a_config_that_cannot_be_measured_is_refused_in_one_line(
    config: Path, distil: Distil, change: dict[str, Any], parts: list[str]
) -> None:
    values = yaml.safe_load(config.read_text(encoding="utf-8")) | change
    config.write_text(yaml.safe_dump(values), encoding="utf-8")
    assert_refused(distil("bench", config), *parts)
