"""Continue what an earlier version made, by support/promises.py: a corpus, runs and a recipe.

On the machine that made them the results are equal bit for bit. Elsewhere processors add up in
other orders, and losses agree to 1e-4.
"""

import json
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from support import promises
from support.runs import edit_state, step_folder
from typer.testing import CliRunner

from launch.cli import app
from launch.config import load_config
from pretrain import RunError
from pretrain.config import RunConfig
from pretrain.export.onnx import write
from pretrain.replay import replay
from pretrain.run_folder import check_output, recorded

OURS = "distil-pretraining"
EXPECTED = json.loads((promises.HERE / "expected.json").read_text(encoding="utf-8"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the folders, which is the working directory."""
    copied = tmp_path / "promises"
    shutil.copytree(promises.HERE, copied)
    monkeypatch.chdir(copied)
    return copied


def distil(*arguments: str) -> str:
    """Run a command in this process; return what it printed."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.output


def compare(folder: Path, name: str) -> None:
    """Compare a run's results, and those of its export, with what the earlier version wrote."""
    found, expected = promises.ends(folder, name), EXPECTED["runs"][name]
    here, there = promises.machine(), EXPECTED["machine"]
    if here == there:
        assert found == expected
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    assert found["validation"] == pytest.approx(expected["validation"], rel=1e-3)
    distil("export", f"runs/{name}", f"exports/{name}")
    files = promises.exported(folder / "exports" / name)
    assert files.keys() == EXPECTED["exports"][name].keys()
    if here == there:
        assert files == EXPECTED["exports"][name]


def test_the_corpus_is_verified_and_made_again(folder: Path) -> None:
    assert "are whole" in distil("verify", "shards")
    digest = json.loads((folder / "shards" / "manifest.json").read_bytes())["digest"]
    distil("prepare", "corpus.yaml", "output=again")
    assert json.loads((folder / "again" / "manifest.json").read_bytes())["digest"] == digest


@pytest.mark.parametrize("name", [name for name in promises.OBJECTIVES if name != "mlm"])
def test_an_unfinished_run_is_continued(name: str, folder: Path) -> None:
    distil("pretrain", f"{name}.yaml")
    lines = (folder / "runs" / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    entries: list[dict[str, Any]] = [json.loads(line) for line in lines]
    assert [e["step"] for e in entries if e["kind"] == "train"] == [*range(1, promises.STEPS + 1)]
    compare(folder, name)


@pytest.mark.parametrize("name", [*promises.OBJECTIVES, "tuned"])
def test_the_config_of_an_earlier_version_is_read(name: str) -> None:
    known = recorded(promises.HERE / "runs" / name)
    written = json.loads((promises.HERE / "runs" / name / "config.json").read_bytes())
    assert known is not None
    assert known.objective.model_dump(mode="json").items() <= written["objective"].items()
    assert str(known.shards) == written["shards"]


def test_a_mask_that_is_gone_is_read_but_neither_continued_nor_replayed(folder: Path) -> None:
    run = folder / "runs" / "distilbert"
    written = (run / "config.json").read_text(encoding="utf-8")
    (run / "config.json").write_text(written.replace('"smoothed"', '"span"'), encoding="utf-8")
    edit_state(
        step_folder(run, 4),
        lambda state: [state[key]["masking"].update(mode="span") for key in ("config", "shaping")],
    )
    known = recorded(run)
    assert known is not None and known.masking.mode == "uniform"
    with pytest.raises(RunError, match=r"masking\.mode was span and is now smoothed"):
        check_output(load_config(RunConfig, Path("distilbert.yaml")))
    with pytest.raises(RunError, match="replay it with the version that did"):
        replay(run, 1)
    edit_state(
        step_folder(run, 4),
        lambda state: [
            state[key]["objective"].update(divergence="js")
            for key in state
            if key in ("config", "shaping")
        ],
    )
    with pytest.raises(RunError, match=r"objective\.divergence was js and is now gone"):
        check_output(load_config(RunConfig, Path("distilbert.yaml")))


@pytest.mark.slow
def test_stages_are_up_to_date_and_made_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An ONNX file names the version that made it.
    monkeypatch.setattr(write, "version", lambda name: {OURS: "0.1.0"}.get(name) or version(name))
    assert distil("recipe", "stages.yaml").count("up to date") >= 3
    for name in ("pruned", "exported"):
        assert promises.exported(folder / name) == EXPECTED["stages"][name]
    distil("recipe", "stages.yaml", "runs.2.output=again/pruned", "runs.3.output=again/exported")
    for name in ("pruned", "exported"):
        files, expected = promises.exported(folder / "again" / name), EXPECTED["stages"][name]
        assert files.keys() == expected.keys()
        if promises.machine() == EXPECTED["machine"]:
            assert {key for key in files if files[key] != expected[key]} <= {"onnx/export.json"}
    before, now = (
        json.loads((folder / where / "exported" / "onnx" / "export.json").read_bytes())
        for where in (".", "again")
    )
    for gone in ("kept", "per_channel", "reduce_range", "rounds"):  # of a search that is gone
        del before["files"]["model_quantized.onnx"][gone]
    del before["inputs"]["cpu"]
    if promises.machine() == EXPECTED["machine"]:
        assert before == now


@pytest.mark.slow
def test_a_sweep_is_continued(folder: Path) -> None:
    finished = folder / "runs" / promises.SWEEP[0] / "metrics.jsonl"
    before = finished.read_bytes()
    distil("recipe", "sweep.yaml")
    assert finished.read_bytes() == before
    for name in promises.SWEEP:
        compare(folder, name)


def test_a_recipe_is_continued_in_its_first_run(folder: Path) -> None:
    distil("recipe", "recipe.yaml")
    for name in ("mlm", "second"):
        compare(folder, name)
