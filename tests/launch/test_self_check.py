"""Test `distil bench --self-check`: its curves on this machine, a difference, a failing run."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import warm

from launch import self_check
from pretrain.objectives.known import OBJECTIVES
from pretrain.tasks.folders import TASKS

Distil = Callable[..., tuple[int, str, str]]


@pytest.mark.slow
def test_this_machine_computes_the_stored_curves(
    distil: Distil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "python", lambda: sys.executable)  # it kills a process
    record = tmp_path / "record.json"
    code, out, error = distil("bench", "--self-check", "--record", record)
    assert code == 0, out + error
    assert "FAILED" not in out
    rows = {row["model"]: row["figures"] for row in json.loads(record.read_bytes())[0]["rows"]}
    for name in ("objective tinybert", "family modernbert", "resumed after a kill"):
        assert rows[name]["difference"]["value"] < 1e-4 and rows[name]["ok"]["value"] == 1


def test_another_curve_and_a_run_that_fails_are_reported(
    distil: Distil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    curves = json.loads(self_check.CURVES.read_bytes())
    curves["objective mlm"][-1] *= 1.01
    (tmp_path / "curves.json").write_text(json.dumps(curves))
    monkeypatch.setattr(self_check, "CURVES", tmp_path / "curves.json")
    runs = self_check.runs

    def some(folder: Path) -> dict[str, dict[str, Any]]:
        found = {name: runs(folder)[f"objective {name}"] for name in ("mlm", "minilm 2")}
        found["minilm 2"]["shards"] = str(tmp_path)
        return {f"objective {name}": values for name, values in found.items()}

    monkeypatch.setattr(self_check, "runs", some)
    monkeypatch.setattr(self_check, "killed_curve", lambda values: [1.0])
    code, out, _ = distil("bench", "--self-check")
    assert code == 1
    assert "objective mlm: FAILED 1e-02" in out
    assert "objective minilm 2: FAILED" in out and "CorpusError" in out
    assert f"1 of {self_check._KILLED} steps" in out and "3 FAILED" in out


def test_every_objective_is_checked() -> None:
    of_corpora = [kind for kind in OBJECTIVES if not TASKS[kind.tasks[0]].has_head]
    known = {kind.model_fields["name"].default for kind in of_corpora}
    assert {objective["name"] for objective in self_check.OBJECTIVES.values()} == known


@pytest.mark.parametrize("more", [["x.yaml"], ["--repeats", "3"]])
def test_other_options_are_refused(distil: Distil, more: list[str]) -> None:
    code, _, err = distil("bench", "--self-check", *more)
    assert code == 2 and "--self-check: takes only --record" in err
