"""Score runs on a task in a recipe: the table, what is kept of it, and mistakes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import task_data

from pretrain.evaluation.tasks import evaluate_tasks

Distil = Callable[..., Any]


def test_scores_of_runs_are_those_of_evaluate_and_are_kept(
    distil: Distil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare a teacher with two seeds of a student, of which one is the median."""
    monkeypatch.chdir(tmp_path)
    shards, kind = task_data.make(tmp_path, "classification"), "classification"
    task_data.save_model(tmp_path / "model", "bert", kind)
    init = {"init": str(tmp_path / "model"), "hidden_dropout_prob": 0.0}
    base = task_data.run_of(tmp_path, kind, train={"max_steps": 4})
    teacher = {**base, "output": "teacher", "model": init}
    students = [
        {
            **base,
            "output": f"student-{seed}",
            "teacher": "teacher",
            "objective": {"name": "kd"},
            "student": {"architecture": "same", "init": [0]},
            "train": {**base["train"], "seed": seed},
        }
        for seed in (0, 1)
    ]
    scores: dict[str, Any] = {
        "stage": "scores",
        "output": "scores",
        "models": {
            "teacher": ["teacher"],
            "student": ["student-0", "student-1"],
            "again": ["student-1"],
        },
        "teacher": "teacher",
        "baseline": "again",
        "timed": True,
        "published": {"paper": {"average": 0.5}},
    }
    recipe = {"runs": [teacher, *students, scores]}
    Path("recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    code, out, err = distil("recipe", "recipe.yaml")
    assert code == 0, out + err
    kept = json.loads(Path("scores/scores.json").read_bytes())
    names = ["teacher", "student-0", "student-1"]
    found = {n: f["score"].value for n, f in evaluate_tasks(names, shards).items()}
    figures = kept["figures"]
    assert figures["teacher"][shards.name]["value"] == found["teacher"]
    assert figures["student"]["average"]["value"] == min(found["student-0"], found["student-1"])
    assert {seed: kept["seeds"]["student"][shards.name][seed] for seed in ("0", "1")} == {
        seed: found[f"student-{seed}"] for seed in ("0", "1")
    }
    assert kept["others"]["student"]["sign"] == "one seed"  # of the baseline
    # Twelve examples: no teacher is two standard errors ahead.
    assert kept["others"]["student"]["room"] == "no room" and "room" not in kept["others"]["again"]
    assert "room: (x - again) / (teacher - again)" in out
    assert kept["others"]["teacher"]["M parameters"] > 0 and "paper, published" in out
    assert "(done)" in distil("recipe", "recipe.yaml").out
    recipe["runs"] = [scores | {"models": {"teacher": ["teacher"], "again": ["nothing"]}}]
    Path("recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    code, _, err = distil("recipe", "recipe.yaml")
    assert code == 2 and "nothing: no such run" in err
