"""Test recipes: runs in their order, each up to date or continued, and mistakes before any run."""

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import warm
from support.processes import assert_refused, wait_until

Distil = Callable[..., Any]


@pytest.fixture
def recipe(tmp_path: Path, shards: Path) -> Path:
    """Write a recipe of a tiny BERT, and a student of it."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
    values = {
        "defaults": {
            "shards": str(shards),
            "train": {"max_steps": 2, "global_batch_size": 4, "precision": "fp32"},
            "evaluation": {"rows": 4},
        },
        "runs": [
            {
                "output": str(tmp_path / "teacher"),
                "objective": {"name": "mlm"},
                "model": {**sizes, "num_hidden_layers": 2},
                "train": {"max_steps": 3},
            },
            {"output": str(tmp_path / "student"), "teacher": str(tmp_path / "teacher")},
        ],
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def ends(folder: Path) -> list[tuple[str, int]]:
    """Return how the runs in a folder ended, and at which step."""
    found = [json.loads(path.read_bytes()) for path in sorted(folder.glob("*/exit_status.json"))]
    return [(status["ended"], status["step"]) for status in found]


def test_the_runs_of_a_recipe_are_trained_in_order(distil: Distil, recipe: Path) -> None:
    assert distil("recipe", recipe, "--dry-run").out.count("run ") == 2
    assert not (recipe.parent / "teacher").exists()
    assert distil("recipe", recipe).code == 0
    assert ends(recipe.parent) == [("finished", 2), ("finished", 3)]
    config = json.loads((recipe.parent / "student" / "config.json").read_bytes())
    assert (config["train"]["max_steps"], config["train"]["global_batch_size"]) == (2, 4)
    files = {path: path.stat().st_mtime_ns for path in recipe.parent.rglob("*.safetensors")}
    assert distil("recipe", recipe).out.count("up to date") == 2
    assert files == {path: path.stat().st_mtime_ns for path in files}


def test_the_student_of_another_teacher_is_not_taken_as_up_to_date(
    distil: Distil, recipe: Path
) -> None:
    assert distil("recipe", recipe).code == 0
    other = recipe.parent / "other"
    changes = [f"runs.0.output={other}", "runs.0.train.seed=1", f"runs.1.teacher={other}"]
    code, _, err = distil("recipe", recipe, *changes)
    assert code == 2 and "has different weights" in err
    assert ends(recipe.parent) == [("finished", 3), ("finished", 2), ("finished", 3)]


def test_sizes_of_the_last_run_are_checked_before_the_first_trains(
    distil: Distil, recipe: Path
) -> None:
    code, _, err = distil("recipe", recipe, "runs.1.student.num_layers=9")
    assert code == 2 and "num_layers 9 is more than the teacher's 2" in err
    assert ends(recipe.parent) == []


@pytest.mark.slow
def test_an_interrupted_recipe_continues(distil: Distil, recipe: Path) -> None:
    argv = ("-m", "launch", "recipe", recipe, "runs.0.train.max_steps=300")
    with warm.Process(*argv, stdout=subprocess.DEVNULL) as process:
        log = recipe.parent / "teacher" / "metrics.jsonl"
        wait_until(log.exists, lambda: "no step was made", alive=lambda: process.poll() is None)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=600) == 75
    assert not (recipe.parent / "student").exists()
    assert distil("recipe", recipe, "runs.0.train.max_steps=300").code == 0
    assert ends(recipe.parent) == [("finished", 2), ("finished", 300)]


@pytest.mark.slow
def test_a_recipe_is_launched_on_several_processes(distil: Distil, recipe: Path) -> None:
    assert distil("recipe", recipe, "--gpus", "2").code == 0
    assert ends(recipe.parent) == [("finished", 2), ("finished", 3)]


def test_a_launched_recipe_that_lies_in_its_output_is_kept(
    distil: Distil, recipe: Path, tmp_path: Path
) -> None:
    values = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    values["runs"] = values["runs"][:1]
    values["defaults"]["train"]["micro_batch_size"] = 4
    kept = tmp_path / "teacher" / "recipe.yaml"
    kept.parent.mkdir()
    kept.write_text(yaml.safe_dump(values), encoding="utf-8")
    before = kept.read_bytes()
    asked = ("recipe", kept, "--gpus", "1")
    assert distil(*asked).code == 0
    assert kept.read_bytes() == before and ends(tmp_path) == [("finished", 3)]
    assert distil(*asked).code == 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["runs.1.train.max_stepz=1"], "unknown key runs.1.train.max_stepz"),
        (["defaults.train.max_stepz=1"], "unknown key runs.0.train.max_stepz"),
        (["runs.1.output=null"], "runs.1.output"),
        (["runs=[]"], "runs: tuple should have at least 1 item"),
        (["defaults.shards=nowhere"], "nowhere holds no finished shards"),
        (["runs.1.shards=nowhere"], "nowhere holds no finished shards"),
        (["runs.1.teacher=./nowhere"], "teacher ./nowhere: there is no nowhere/config.json"),
        (["runs.1.student.init=nowhere"], "student.init nowhere: there is no nowhere/config.json"),
        (["runs.0.model={init: ./nowhere}"], "model.init ./nowhere: there is no"),
        (["runs.1.train.micro_batch_size=3"], "global_batch_size 4 is not a multiple of"),
    ],
    ids=str,
)
def test_a_mistake_in_any_run_is_answered_before_the_first(
    distil: Distil, recipe: Path, overrides: list[str], message: str
) -> None:
    assert_refused(distil("recipe", recipe, *overrides), message)
    assert not (recipe.parent / "teacher").exists()


def test_two_runs_with_one_output_are_refused(distil: Distil, recipe: Path) -> None:
    output = f"runs.1.output={recipe.parent / 'teacher'}"
    assert_refused(distil("recipe", recipe, output), "runs 1 and 2 have the output")
