"""Test learning-rate schedules, and runs that continue another one under a new schedule."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support.results import state
from support.runs import history, refused, reseal_checkpoint, start, step_folder

from pretrain.config import Optimizer
from pretrain.export.card import model_card
from pretrain.model.folder import load_model
from pretrain.step import learning_rate

Settings = Callable[..., dict[str, Any]]


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


@pytest.fixture
def make(teacher_folder: Path, run_config: Settings, tmp_path: Path) -> Settings:
    """Return runs with dropout and wsd: a warm-up of 2 steps, and a decay in the last quarter."""

    def make(name: str, num_steps: int, **changes: Any) -> dict[str, Any]:
        optimizer = {"learning_rate": 1e-3, "schedule": "wsd", "decay_ratio": 0.25}
        sections = {
            "student": {"num_layers": 2, "dropout": 0.1},
            "optimizer": {**optimizer, "warmup_ratio": 2 / num_steps},
            "train": {"max_steps": num_steps, "global_batch_size": 4},
            "evaluation": {"every": 1, "rows": 4},
            "checkpoint": {"every": 1, "keep": 1},
        }
        values = run_config(tmp_path / name, teacher_folder, **sections)
        for key, change in changes.items():
            values[key] = {**values[key], **change} if isinstance(change, dict) else change
        return values

    return make


def test_a_run_continues_from_before_the_decay_of_another(make: Settings) -> None:
    """Compare bitwise with a run of that length and schedule from its first step on."""
    short, straight = make("short", 8), make("straight", 12)
    start(short)
    start(straight)
    kept = sorted(path.name for path in Path(short["output"], "checkpoints").glob("step-*"))
    assert "step-00000006" in kept and "step-00000008" in kept and "step-00000005" not in kept

    longer = make("longer", 12, resume_from=short["output"])
    assert start(longer, stop_after=7).step == 7
    assert [entry["step"] for entry in history(longer["output"]) if entry["kind"] == "train"] == [7]
    outcome = start(longer)  # from its own checkpoint now
    assert (outcome.step, outcome.ended) == (12, "finished")
    for file in ("student/model.safetensors", "optimizer.safetensors"):
        one, other = (
            load_file(step_folder(values["output"], 12) / file) for values in (longer, straight)
        )
        assert one.keys() == other.keys()
        assert all(one[name].equal(other[name]) for name in one), file
    card = str(
        model_card(load_model(step_folder(longer["output"], 12) / "student"), state(longer, 12))
    )
    assert "continued from step 6 of another run" in card and short["output"] not in card


def test_a_finished_run_of_another_schedule_continues_from_its_end(make: Settings) -> None:
    linear = {"schedule": "linear", "decay_ratio": 0.1}
    done = make("done", 4, optimizer=linear)
    start(done)
    longer = make(
        "longer", 8, optimizer={**linear, "schedule": "cosine"}, resume_from=done["output"]
    )
    start(longer, stop_after=5)
    steps = [entry["step"] for entry in history(longer["output"]) if entry["kind"] == "train"]
    assert steps == [5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": {"learning_rate": 1e-4}}, "optimizer.learning_rate was 0.001 and is now"),
        ({"masking": {"probability": 0.3}}, "masking.probability was 0.15 and is now 0.3"),
        ({"train": {"max_steps": 3}}, "is at step 3 and this run ends at step 3; set train.max"),
        (
            {"optimizer": {"warmup_ratio": 0.5}},
            "within this run's warm-up of 6 steps; set optimizer.warmup_ratio to at most 0.25",
        ),
    ],
    ids=["rate", "masking", "end", "warm-up"],
)
def test_what_does_not_continue_a_run_is_refused(
    make: Settings, changes: dict[str, Any], message: str
) -> None:
    short = make("short", 4)
    start(short)
    values = make("other", 12, resume_from=short["output"])
    for key, change in changes.items():
        values[key] = {**values.get(key, {}), **change}
    may_differ = "optimizer.decay_ratio may differ from" if " was " in message else ""
    with refused("resume_from", message, may_differ):
        start(values)
    assert not list(Path(values["output"]).glob("checkpoints/*"))


def test_a_lost_checkpoint_before_the_decay_is_named(make: Settings) -> None:
    short = make("short", 4)
    start(short)
    shutil.rmtree(step_folder(short["output"], 3))
    with refused("resume_from: ", "has no checkpoint of step 3, before its decay"):
        start(make("other", 12, resume_from=short["output"]))
    with refused("no checkpoint; give the output folder of a run"):
        start(make("other", 12, resume_from=short["shards"]))


def test_a_run_of_a_version_without_schedules_is_resumed(make: Settings) -> None:
    values = make("old", 4, optimizer={"schedule": "linear", "decay_ratio": 0.1})
    start(values, stop_after=2)
    folder = step_folder(values["output"], 2)
    recorded = json.loads((folder / "state.json").read_bytes())
    for key in ("config", "shaping"):
        for name in ("schedule", "decay_ratio"):
            del recorded[key]["optimizer"][name]
    del recorded["notes"], recorded["before_decay"], recorded["config"]["resume_from"]
    (folder / "state.json").write_text(json.dumps(recorded), encoding="utf-8")
    reseal_checkpoint(folder)
    assert start(values).ended == "finished"
    values["optimizer"]["schedule"] = "cosine"
    with refused("optimizer.schedule was linear and is now cosine"):
        start(values)
