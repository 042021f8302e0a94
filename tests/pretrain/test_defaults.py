"""Check that objectives bring measured defaults, and that a run that has begun keeps its own."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.runs import history, start

from pretrain.config import RunConfig

MEASURED = {
    "embedding": (0.0, 5e-4, 1.0, 0.0, 4),
    "minilm": (0.0, 5e-4, 1.0, 0.0, 4),
    "kd": (0.1, 1e-4, 1.0, 0.01, 32),
    "tinybert": (0.1, 1e-4, 1.0, 0.01, 32),
    "distilbert": (0.1, 5e-4, 5.0, 0.0, 4096),
}


def resolved(name: str, output: Path, **more: Any) -> tuple[Any, ...]:
    values = {"output": str(output), "shards": "none", "teacher": "t", "objective": {"name": name}}
    found = RunConfig.model_validate(values | more)
    rate = found.optimizer
    shown = rate.learning_rate, rate.max_grad_norm, rate.weight_decay
    return found.student.dropout, *shown, found.train


@pytest.mark.parametrize("name", MEASURED)
def test_an_objective_brings_what_its_record_used(name: str, tmp_path: Path) -> None:
    *found, train = resolved(name, tmp_path / "new")
    assert (*found, train.global_batch_size) == MEASURED[name]
    *found, train = resolved(name, tmp_path, optimizer={"learning_rate": 1e-3, "weight_decay": 0.2})
    assert found == [MEASURED[name][0], 1e-3, MEASURED[name][2], 0.2]  # what is written wins


def test_a_run_that_has_begun_keeps_its_defaults(tmp_path: Path) -> None:
    """Write the config of a run of an earlier version, and of another objective."""
    begun = {"objective": {"name": "kd"}, "optimizer": {"learning_rate": 5e-4, "betas": [0.9, 0.9]}}
    (tmp_path / "config.json").write_text(json.dumps(begun), encoding="utf-8")
    *found, train = resolved("kd", tmp_path)
    assert found[1:] == [5e-4, 1.0, 0.01] and train.global_batch_size == 32
    assert resolved("pkd", tmp_path)[1] == 1e-4
    (tmp_path / "config.json").write_text("[", encoding="utf-8")
    assert resolved("kd", tmp_path)[1] == 1e-4


def test_the_config_of_an_earlier_run_is_read(tmp_path: Path) -> None:
    values = {"output": "o", "shards": "s", "teacher": "t", "resume_from": None}
    assert RunConfig.model_validate(values).teacher == "t"
    with pytest.raises(ValueError, match="resume_from"):
        RunConfig.model_validate({**values, "resume_from": "run"})


def test_such_a_run_continues_bit_by_bit(
    tmp_path: Path, teacher_folder: Path, run_config: Callable[..., dict[str, Any]]
) -> None:
    """Begin with what were the defaults of all objectives, and leave them out after a stop."""
    few = {"max_steps": 4, "global_batch_size": 4}
    short = {"objective": {"name": "minilm", "relation_heads": 4}, "train": few}
    kept = {"architecture": "same", "num_layers": 2}
    before = {**kept, "dropout": 0.1, "attention_dropout": 0.1}
    curves = []
    for name, stop in (("stopped", 2), ("whole", None)):
        old = {"student": before, "optimizer": {"learning_rate": 1e-3, "max_grad_norm": 0.01}}
        start(run_config(tmp_path / name, teacher_folder, **short, **old), stop_after=stop)
        later = {"student": kept, "optimizer": {"learning_rate": 1e-3}}
        start(run_config(tmp_path / name, teacher_folder, **short, **later))
        curves.append([e["loss"] for e in history(tmp_path / name) if e["kind"] == "train"])
    assert curves[0] == curves[1] and len(curves[0]) == 4
