"""Test a recipe's stages: text to an exported student in one file, continued, and mistakes."""

import json
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import warm
from transformers import AutoModelForMaskedLM, AutoTokenizer

from launch.stages.stage import version_of

Distil = Callable[..., Any]


@pytest.fixture
def recipe(own_encoder: dict[str, Any]) -> dict[str, Any]:
    """Return the shipped recipe at tiny size."""
    return own_encoder


def write(values: dict[str, Any]) -> str:
    """Write a recipe; return its name."""
    Path("recipe.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return "recipe.yaml"


def test_text_becomes_an_exported_student_in_one_command(
    distil: Distil, recipe: dict[str, Any]
) -> None:
    out = distil("recipe", write(recipe), "--dry-run").out
    assert out.count("(new)") == 5 and "steps: about" in out
    assert [path.name for path in Path().iterdir()] == ["recipe.yaml"]
    code, out, err = distil("recipe", "recipe.yaml")
    assert code == 0, out + err
    folder = Path("runs/own-encoder")
    model = AutoModelForMaskedLM.from_pretrained(folder / "exported")
    tokenizer = AutoTokenizer.from_pretrained(folder / "exported")
    assert model.config.num_hidden_layers == 2
    assert model(**tokenizer("a text", return_tensors="pt")).logits.shape[-1] == 400
    figures = json.loads((folder / "figures" / "figures.json").read_bytes())["figures"]
    assert {"student", "teacher", "guessing"} <= figures.keys()

    files = {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}
    code, out, _ = distil("recipe", "recipe.yaml")
    assert code == 0 and out.count("(done)") == 5 and out.count("up to date") == 5
    assert files == {path: path.stat().st_mtime_ns for path in files}


def test_what_changed_is_measured_and_compared_again(
    distil: Distil, recipe: dict[str, Any], tmp_path: Path
) -> None:
    assert distil("recipe", write(recipe)).code == 0
    kept = Path("runs/own-encoder/figures/figures.json")
    before = json.loads(kept.read_bytes())
    recipe["runs"][3]["rows"] = 3
    code, out, _ = distil("recipe", write(recipe))
    assert code == 0 and "figures of 1 model(s) (new)" in out
    assert json.loads(kept.read_bytes())["inputs"] != before["inputs"]
    # An export that somebody has edited is not taken for this run's, and is left alone.
    edited = Path("runs/own-encoder/exported/config.json")
    edited.write_text(edited.read_text() + " ")
    edited.write_text(edited.read_text().replace('"dim": 16', '"dim": 17'))
    code, _, err = distil("recipe", "recipe.yaml")
    assert code == 2 and "already there with another config.json" in err
    assert '"dim": 17' in edited.read_text()


@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        (0, {"stage": "prepar"}, "runs.0: stage 'prepar' is not known; did you mean prepare?"),
        (0, {"row_lenght": 3}, "unknown key runs.0.row_lenght; did you mean runs.0.row_length?"),
        (3, {"modles": ["x"]}, "unknown key runs.3.modles; did you mean runs.3.models?"),
        (4, {"run": "runs/own-encoder/nowhere"}, "run 5 needs run runs/own-encoder/nowhere, which"),
        (3, {"models": ["runs/own-encoder/exported"]}, "run 5 makes: put that one first"),
        (2, {"student": {"num_layers": 9}}, "num_layers 9 is more than the teacher's 4"),
        (
            1,
            {"sources": []},
            "unknown key runs.1.sources: stage train has no sources (prepare has)",
        ),
    ],
)
def test_a_mistake_in_any_stage_is_answered_before_the_first(
    distil: Distil, recipe: dict[str, Any], place: int, change: dict[str, Any], message: str
) -> None:
    recipe["runs"][place] |= change
    code, _, err = distil("recipe", write(recipe))
    assert code == 2 and message in err and len(err.splitlines()) == 1
    assert not Path("runs").exists()


def test_a_missing_text_is_named_before_the_first_stage(
    distil: Distil, recipe: dict[str, Any]
) -> None:
    recipe["runs"][0]["sources"] = [{"kind": "text", "path": "nowhere.txt"}]
    code, _, err = distil("recipe", write(recipe))
    assert code == 2 and "nowhere.txt" in err and not Path("runs").exists()


def test_a_recipe_continues_when_its_corpus_is_unfinished(
    distil: Distil, recipe: dict[str, Any]
) -> None:
    Path("runs/own-encoder/shards/.work").mkdir(parents=True)  # what a kill leaves
    assert distil("recipe", write(recipe), "--dry-run").out.count("steps: about") == 2
    code, out, _ = distil("recipe", "recipe.yaml")
    assert code == 0
    # The whole first, and what came of each stage last.
    assert "  2  runs/own-encoder/teacher: objective mlm, new" in out.split("run 1 of")[0]
    rows = [line.split("│")[1:4] for line in out.splitlines() if line.startswith("│ runs/own")]
    shown = {name.strip(): result.strip() for name, _, result in rows[-len(recipe["runs"]) :]}
    assert shown["runs/own-encoder/student"].startswith("step 2 of 2, loss ")
    manifest = json.loads(Path("runs/own-encoder/shards/manifest.json").read_bytes())
    assert shown["runs/own-encoder/shards"].startswith(
        f"{manifest['splits']['train']['rows']:,} rows"
    )


def test_a_recipe_says_what_came_of_each_stage_after_an_error_too(
    distil: Distil, recipe: dict[str, Any]
) -> None:
    recipe["runs"][3]["models"] = ["runs/own-encoder/student"]
    recipe["runs"][3]["data"] = "runs/own-encoder/shards"
    recipe["runs"][0]["validation"] = 0.0  # which the figures need
    code, out, err = distil("recipe", write(recipe))
    assert code == 2 and err.startswith("error: "), out + err
    rows = [line.split("│")[1:4] for line in out.splitlines() if line.startswith("│ runs/own")]
    assert [result.strip() for _, _, result in rows][-1] == "not begun"


def test_a_signal_in_the_corpus_ends_with_75_and_the_same_command_continues(
    recipe: dict[str, Any],
) -> None:
    lines = (f"Line {i} of a text that takes a while, with {i * i} in it." for i in range(200_000))
    Path("large.txt").write_text("\n".join(lines), encoding="utf-8")
    recipe["runs"][0]["sources"][0] |= {"path": "large.txt", "fraction": 1.0}
    command = ("-m", "launch", "recipe", write(recipe))
    screen = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = warm.Process(*command, **screen)
    assert process.stdout is not None
    shown = ""
    while "extract  0.0 of " not in shown:
        shown += process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    rest = process.stdout.read()
    assert process.wait(600) == 75 and "stopped; the same command continues" in rest


def test_figures_of_another_model_or_name_are_measured_again(
    distil: Distil, recipe: dict[str, Any]
) -> None:
    recipe["runs"].append(recipe["runs"].pop(3))  # the export comes before the figures
    recipe["runs"][4]["models"] = ["runs/own-encoder/student", "runs/own-encoder/exported"]
    assert distil("recipe", write(recipe)).code == 0
    # A card that was written after figures were kept, or by another release, is the same export.
    config = Path("runs/own-encoder/exported/config.json")
    values = json.loads(config.read_bytes())
    config.write_text(json.dumps({**values, "transformers_version": "4.0"}))
    card = config.with_name("README.md")
    card.write_text(card.read_text() + "more")
    code, out, err = distil("recipe", "recipe.yaml")
    assert code == 0 and "from step 2, up to date" in out, err
    Path("runs/own-encoder/exported").rename("runs/own-encoder/renamed")
    recipe["runs"][3]["output"] = recipe["runs"][4]["models"][1] = "runs/own-encoder/renamed"
    assert distil("recipe", write(recipe)).code == 0
    figures = json.loads(Path("runs/own-encoder/figures/figures.json").read_bytes())["figures"]
    assert "renamed" in figures and "exported" not in figures


@pytest.mark.parametrize(
    ("place", "file", "message"),
    [
        (0, "runs/own-encoder/shards/mine.txt", "holds mine.txt, no part of an unfinished corpus"),
        (3, "runs/own-encoder/figures/figures.json", "holds figures.json, which no evaluation has"),
        (3, "runs/own-encoder/figures", "is not a folder; set another `output:`"),
        (4, "runs/own-encoder/exported/mine.txt", "holds mine.txt, which no export has written"),
    ],
)
def test_what_a_user_has_written_is_left_before_the_first_stage(
    distil: Distil, recipe: dict[str, Any], place: int, file: str, message: str
) -> None:
    path = Path(file)
    path.parent.mkdir(parents=True)
    path.write_text('{"mine": 1}')
    code, _, err = distil("recipe", write(recipe))
    assert code == 2 and message in err and len(err.splitlines()) == 1
    assert [p for p in Path("runs").rglob("*") if p.is_file()] == [path]


def test_two_names_of_one_folder_and_a_missing_tokenizer_are_refused(
    distil: Distil, recipe: dict[str, Any], tmp_path: Path
) -> None:
    recipe["runs"][4]["output"] = str(tmp_path / "runs/own-encoder/figures")
    _, _, err = distil("recipe", write(recipe))
    assert "runs 4 and 5 have the output" in err
    recipe["runs"][4]["output"] = "runs/own-encoder/exported"
    recipe["runs"][0]["tokenizer"] = "nowhere/tokenizer.json"
    code, _, err = distil("recipe", write(recipe), "--dry-run")
    assert code == 2 and "no such tokenizer file" in err and not Path("runs").exists()


def test_two_checkpoints_are_two_versions(
    tmp_path: Path, seal: Callable[[Path, Mapping[str, Any]], Path]
) -> None:
    """Their manifests have one length, so only their content tells them apart."""
    folders = [seal(tmp_path / name, {"step": 3, "loss": name}) for name in ("a", "b")]
    sizes = {(folder / "manifest.json").stat().st_size for folder in folders}
    assert len(sizes) == 1
    assert version_of(str(tmp_path / "a")) != version_of(str(tmp_path / "b"))


def test_an_export_that_cannot_be_measured_is_refused_before_the_first_stage(
    distil: Distil, recipe: dict[str, Any], save_teacher: Callable[..., Path]
) -> None:
    save_teacher(Path("finished"))
    recipe["runs"][1:] = [
        {"stage": "export", "output": "exported", "run": "finished", "int8": True}
    ]
    code, _, err = distil("recipe", write(recipe))
    assert code == 2 and "give --data SHARDS" in err
    assert not Path("runs").exists() and not Path("exported").exists()
