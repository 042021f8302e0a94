"""Check what `distil bench` measures of a step, prints, records and refuses."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.tiny import save_teacher

from pretrain.bench import machine
from pretrain.bench.micro_step import asked, measure, random_models
from pretrain.config import RunConfig
from pretrain.device.memory import allocated
from pretrain.model.families import FAMILIES

Distil = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _short_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the peak be of smaller products: each measurement takes half a second else."""
    monkeypatch.setitem(machine._SIZES, "cpu", 256)


@pytest.fixture
def values(tmp_path: Path, corpus: Path) -> dict[str, Any]:
    save_teacher(tmp_path / "teacher")
    return {
        "output": str(tmp_path / "run"),
        "shards": str(corpus),
        "teacher": str(tmp_path / "teacher"),
        "objective": {"temperature": 3.0, "kl_positions": "masked"},
        "train": {"precision": "fp32", "micro_batch_size": 4, "global_batch_size": 8},
    }


@pytest.fixture
def config(tmp_path: Path, values: dict[str, Any]) -> Path:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return tmp_path / "run.yaml"


def test_a_config_is_measured_in_its_own_precision_and_rows(
    tmp_path: Path, config: Path, distil: Distil
) -> None:
    record = tmp_path / "record.json"
    code, out, err = distil("bench", config, "student.num_layers=1", "--record", record)
    assert code == 0, out + err
    assert "4 -> 1 layers" in out and "tokens of shards" in out and "GFLOP/s (fp32)" in out
    text = record.read_text(encoding="utf-8")
    assert str(ROOT) not in text and os.uname().nodename not in text
    [row] = json.loads(text)[0]["rows"]
    assert row["model"] == "fp32 4 rows: ours"
    assert all(figure["value"] > 0 for figure in row["figures"].values())
    assert row["figures"]["share of the measured peak"]["value"] < 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("objective", ["mlm", "minilm", "tinybert", "embedding"])
def test_each_objective_is_measured(objective: str, values: dict[str, Any]) -> None:
    values["objective"] = {"name": objective}
    if objective == "mlm":
        values["model"] = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
        values["model"] |= {"intermediate_size": 64, "max_position_embeddings": 64}
        del values["teacher"]
    elif objective != "embedding":
        values["student"] = {"architecture": "same"}
    run = RunConfig.model_validate(values)
    said: list[str] = []
    tried = [(p, n) for p in ("fp32", "bf16") for n in (1, 2)]
    each = [run.with_train(precision=p, micro_batch_size=n) for p, n in tried]
    found, peaks = measure([asked(one, CPU)[0] for one in each], CPU, 1, said.append)
    assert [(f.precision, f.rows) for f in found] == tried
    assert all(f.tokens and f.milliseconds > 0 and 0 < f.of_peak < 1 for f in found)
    assert found[1].peak_bytes > found[0].peak_bytes > 0 and peaks.keys() == {"fp32", "bf16"}
    assert len(said) == 1


def test_a_step_that_does_not_fit_is_reported(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pretrain.bench.micro_step.timed", lambda *_: torch.empty(1 << 55))
    [found], _ = measure(asked(RunConfig.model_validate(values), CPU)[:1], CPU, 1, print)
    assert found.tokens == 0


def test_allocated_memory_is_what_was_made() -> None:
    """A tensor of 4 MB is held, and one of 8 MB is freed before the end."""

    def work() -> torch.Tensor:
        made = torch.ones(10**6)
        torch.ones(2 * 10**6).sum()
        return made

    peak, left = allocated(work, CPU)
    assert left == pytest.approx(4e6, rel=0.01) and peak == pytest.approx(12e6, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["shipped:demo.yaml", "train.precision=fp16"], ["train.precision fp16", "GPU"]),
        (["nowhere.yaml"], ["nowhere.yaml", "no such file"]),
        (["--record", "."], ["--record ."]),
    ],
)
def test_mistakes_are_reported_in_one_line(
    distil: Distil, monkeypatch: pytest.MonkeyPatch, arguments: list[str], parts: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, err = distil("bench", *arguments)
    assert code == 2 and len(err.strip().splitlines()) == 1, err
    assert all(part in err for part in parts), err


def test_too_few_rows_or_words_are_refused(
    tmp_path: Path, config: Path, values: dict[str, Any], distil: Distil
) -> None:
    code, _, err = distil("bench", config, "train.micro_batch_size=1000000")
    assert code == 2 and "1000000" in err and "rows" in err
    settings = json.loads((tmp_path / "teacher" / "config.json").read_bytes())
    (tmp_path / "teacher" / "config.json").write_text(json.dumps({**settings, "vocab_size": 9}))
    code, _, err = distil("bench", config)
    assert code == 2 and values["shards"] in err and "9" in err


def test_what_bench_cannot_build_is_refused_in_one_line(
    tmp_path: Path, values: dict[str, Any], distil: Distil
) -> None:
    """Take a model beside a teacher, a vocabulary without room for random rows, and no length."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    both = {**values, "objective": {"name": "embedding"}, "model": sizes}
    settings = json.loads((tmp_path / "teacher" / "config.json").read_bytes())
    (tmp_path / "few").mkdir()
    (tmp_path / "few" / "config.json").write_text(
        json.dumps({**settings, "vocab_size": 90, "max_position_embeddings": 32})
    )
    few = {**values, "teacher": str(tmp_path / "few"), "shards": str(tmp_path / "none")}
    for wrong, part in ((both, "`model:`"), (few, "90")):
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(wrong), encoding="utf-8")
        code, _, err = distil("bench", tmp_path / "run.yaml")
        assert code == 2 and part in err and len(err.strip().splitlines()) == 1, err
    code, _, err = distil("bench", "--model", tmp_path / "few")
    assert code == 2 and "64" in err and len(err.strip().splitlines()) == 1, err


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
        code, _, err = distil("bench", ROOT / "configs" / name)
        assert code == 2 and "measures runs on text" in err, name


@pytest.mark.slow
def test_shipped_configs_can_be_built_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in shipped(task=False):
        values = yaml.safe_load((ROOT / "configs" / name).read_text(encoding="utf-8"))
        models = random_models(RunConfig.model_validate(values))
        assert models.student.training and "random weights" in models.what, name


def test_a_random_teacher_has_the_sizes_of_its_config(tmp_path: Path, distil: Distil) -> None:
    """Take a family with other special ids, positions and names of sizes; no weights are there."""
    family, pad = FAMILIES["modernbert"], 7
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 48, "vocab_size": 210, "max_position_embeddings": 24}
    family.new_config(sizes, {"pad": pad, "cls": 101, "sep": 102}).save_pretrained(tmp_path / "t")
    values = {"output": "run", "shards": "none", "teacher": str(tmp_path / "t")}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    options = ("train.micro_batch_size=2", "train.precision=fp32", "--repeats", 1)
    code, out, err = distil("bench", tmp_path / "run.yaml", *options)
    assert code == 0, out + err
    assert "4 -> 2 layers x 32, 210 words" in out and "rows of 24 tokens" in out
    assert "cannot be read" not in out
