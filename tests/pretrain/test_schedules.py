"""Test learning-rate schedules."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.runs import refused, reseal_checkpoint, start, step_folder

from pretrain.config import Optimizer
from pretrain.step import learning_rate


def rates(num_steps: int, **keys: Any) -> list[float]:
    optimizer = Optimizer(learning_rate=2.0, **keys)
    return [learning_rate(optimizer, step, num_steps) for step in range(num_steps)]


def test_cosine_falls_as_half_a_cosine() -> None:
    found = rates(10, warmup_ratio=0.2, schedule="cosine")
    assert found[:3] == [1.0, 2.0, 2.0]
    assert found[6] == pytest.approx(1.0)  # half way
    assert found[9] == pytest.approx(1 + math.cos(math.pi * 7 / 8))


def test_wsd_stays_at_the_peak_and_falls_in_a_line() -> None:
    found = rates(10, warmup_ratio=0.2, schedule="wsd", decay_ratio=0.4)
    assert found == pytest.approx([1.0, *5 * [2.0], 2.0, 1.5, 1.0, 0.5])
    assert rates(10, warmup_ratio=0.0, schedule="wsd") == 10 * [2.0]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"decay_ratio": 0.2}, "decay_ratio is for schedule wsd; schedule linear has none"),
        (
            {"schedule": "wsd", "warmup_ratio": 0.6, "decay_ratio": 0.5},
            "warmup_ratio and decay_ratio are more than 1 together",
        ),
    ],
)
def test_schedules_that_do_not_fit_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Optimizer(**keys)


def test_a_run_of_a_version_without_schedules_is_resumed(
    tmp_path: Path, teacher_folder: Path, run_config: Callable[..., dict[str, Any]]
) -> None:
    values = run_config(
        tmp_path / "old",
        teacher_folder,
        student={"num_layers": 2, "dropout": 0.1},
        optimizer={"learning_rate": 1e-3, "schedule": "linear"},
        train={"max_steps": 4, "global_batch_size": 4},
        checkpoint={"every": 1, "keep": 1},
    )
    start(values, stop_after=2)
    folder = step_folder(values["output"], 2)
    recorded = json.loads((folder / "state.json").read_bytes())
    for key in ("config", "shaping"):
        for name in ("schedule", "decay_ratio"):
            del recorded[key]["optimizer"][name]
    del recorded["notes"]
    recorded["config"]["resume_from"] = "a-run"  # a key that is gone
    (folder / "state.json").write_text(json.dumps(recorded), encoding="utf-8")
    reseal_checkpoint(folder)
    assert start(values).ended == "finished"
    values["optimizer"]["schedule"] = "cosine"
    with refused("optimizer.schedule was linear and is now cosine"):
        start(values)
