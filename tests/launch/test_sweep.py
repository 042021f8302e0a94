"""Test sweeps: runs, their table against numbers of scipy, continued, and mistakes."""

import csv
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml
from scipy import stats
from support import task_data, warm
from support.processes import in_a_process, wait_until

from data_prep.disk import lock
from launch.config import load_config
from launch.recipe_config import Recipe
from launch.stage_keys import SweepKeys
from launch.stages.stage import How
from launch.stages.sweep import Sweep
from pretrain import RunError

Distil = Callable[..., Any]
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}


@pytest.fixture
def recipe(tmp_path: Path, shards: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return a recipe of two tiny teachers, and of two students of each; one thread each."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return recipe_of(shards)


def recipe_of(shards: Path) -> dict[str, Any]:
    """Return the recipe."""
    return {
        "defaults": {
            "shards": str(shards),
            "train": {"max_steps": 3, "global_batch_size": 4, "precision": "fp32"},
            "evaluation": {"rows": 4, "every": 1},
        },
        "runs": [
            {
                "output": "teacher",
                "objective": {"name": "mlm"},
                "model": {**SIZES, "num_hidden_layers": 2},
                "sweep": {"train.seed": [0, 1]},
                "keep_weights": True,
            },
            {
                "output": "student",
                "teacher": "teacher",
                "sweep": {
                    "train.seed": [0, 1],
                    "short": {"optimizer.learning_rate": 1.0e-4},
                    "long": {"optimizer": {"learning_rate": 1.0e-2}},
                },
            },
        ],
    }


def write(values: dict[str, Any]) -> str:
    """Write a recipe; return its name."""
    Path("recipe.yaml").write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    return "recipe.yaml"


def last_figures(run: str) -> dict[str, float]:
    """Return the last evaluation in a run's metrics.jsonl."""
    lines = Path(run, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    figures: dict[str, float] = [line for line in found if line["kind"] == "evaluation"][-1]
    return figures


def table(folder: str) -> dict[tuple[str, str], dict[str, str]]:
    """Return the rows of a table.csv by figure and entry."""
    with Path(folder, "table.csv").open(encoding="utf-8", newline="") as lines:
        return {(row["figure"], row["entry"]): row for row in csv.DictReader(lines)}


def wait_for_a_step_of_both(output: str, process: warm.Process) -> None:
    """Wait until the runs of both seeds have written metrics."""
    logs = [Path(f"{output}-seed{seed}/metrics.jsonl") for seed in (0, 1)]
    started = lambda: all(log.exists() and log.stat().st_size for log in logs)  # noqa: E731
    wait_until(started, lambda: "no step was made", alive=lambda: process.poll() is None)


def writers(log: Path) -> list[int]:
    """Return the processes whose output goes to a file."""
    found = []
    for output in Path("/proc").glob("[0-9]*/fd/1"):
        with suppress(OSError):  # ended
            if output.resolve() == log.resolve():
                found.append(int(output.parts[2]))
    return found


def test_a_swept_student_has_the_teacher_of_its_seed_and_the_table_is_right(
    distil: Distil, recipe: dict[str, Any]
) -> None:
    out = distil("recipe", write(recipe), "--dry-run").out
    assert "sweep of 4 runs (new)" in out and not Path("teacher").exists()
    code, out, err = distil("recipe", "recipe.yaml")
    assert code == 0, out + err
    runs = ["seed0-short", "seed0-long", "seed1-short", "seed1-long"]
    assert {path.name for path in Path().glob("student-*")} == {f"student-{run}" for run in runs}
    losses = {}
    for run in runs:
        state = json.loads(Path(f"student-{run}", "result.json").read_bytes())["state"]
        seed = run.partition("-")[0]
        (checkpoint,) = Path(f"teacher-{seed}", "checkpoints").glob("step-*/state.json")
        assert state["config"]["teacher"] == f"teacher-{seed}"
        assert state["config"]["train"]["seed"] == int(seed[-1])
        assert json.loads(checkpoint.read_bytes())["step"] == 3
        losses[run] = last_figures(f"student-{run}")["loss"]
        # Weights on request: the teachers have theirs.
        assert not [*Path(f"student-{run}").rglob("*.safetensors")]
    assert [*Path("teacher-seed1").rglob("model.safetensors")]

    found = table("student")
    short = np.array([losses["seed0-short"], losses["seed1-short"]])
    long = np.array([losses["seed0-long"], losses["seed1-long"]])
    for entry, values in (("short", short), ("long", long)):
        row = found["loss", entry]
        assert float(row["mean"]) == pytest.approx(values.mean(), rel=1e-12)
        assert float(row["deviation"]) == pytest.approx(values.std(ddof=1), rel=1e-12)
    interval = stats.ttest_rel(long, short).confidence_interval(0.95)
    row = found["loss", "long"]
    assert float(row["difference"]) == pytest.approx((long - short).mean(), rel=1e-12)
    assert float(row["low"]) == pytest.approx(interval.low, rel=1e-5)
    assert float(row["high"]) == pytest.approx(interval.high, rel=1e-5)
    assert found["loss", "short"]["difference"] == ""
    assert Path("student/table.md").read_text(encoding="utf-8").count("| loss |") == 2
    plot = ElementTree.fromstring(Path("student/curves.svg").read_text(encoding="utf-8"))
    assert len([e for e in plot.iter() if e.tag.endswith("polyline")]) == 2

    files = {path: path.stat().st_mtime_ns for path in Path().rglob("metrics.jsonl")}
    code, out, _ = distil("recipe", "recipe.yaml")
    assert code == 0 and "0 of 4 runs to train" in out and out.count("(done)") == 2
    assert files == {path: path.stat().st_mtime_ns for path in files}


def test_an_override_narrows_a_sweep(recipe: dict[str, Any]) -> None:
    narrowed = (
        "runs.1.sweep.train.seed=[1]",
        "runs.1.sweep.short.optimizer.learning_rate=2e-4",
        "runs.1.sweep.long.optimizer.learning_rate=3e-2",
    )
    _, student = load_config(Recipe, Path(write(recipe)), narrowed).runs
    assert isinstance(student, SweepKeys)
    rates = {label: run.optimizer.learning_rate for label, run in student.sweep.items()}
    assert rates == {"seed1-short": 2e-4, "seed1-long": 3e-2}
    assert {str(run.output) for run in student.sweep.values()} == {
        "student-seed1-short",
        "student-seed1-long",
    }


@pytest.mark.parametrize("section", ["student", "model"])
def test_each_run_of_a_sweep_begins_from_the_entry_with_its_values(
    tmp_path: Path, section: str
) -> None:
    """`init` lies in a section that the runs share: each must get an entry of its own."""
    again: dict[str, Any] = {"init": "first"}
    more = {"teacher": "t", "student": again} if section == "student" else {"model": again}
    objective = {} if section == "student" else {"objective": {"name": "mlm"}}
    sweep = {"train.seed": [0, 1, 2]}
    runs = [
        {"output": "first", "teacher": "t", "keep_weights": True, "sweep": sweep},
        {"output": "second", **more, **objective, "sweep": dict(sweep)},
    ]
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps({"defaults": {"shards": "s"}, "runs": runs}), encoding="utf-8")
    (_, second) = load_config(Recipe, path).runs
    inits = [getattr(run, section).init for run in second.sweep.values()]
    assert inits == ["first-seed0", "first-seed1", "first-seed2"]


def test_a_run_of_a_sweep_is_the_run_without_one(distil: Distil, recipe: dict[str, Any]) -> None:
    recipe["runs"] = recipe["runs"][:1]
    assert distil("recipe", write(recipe)).code == 0
    plain = dict(recipe["runs"][0], output="plain", train={"seed": 1})
    del plain["sweep"], plain["keep_weights"]
    assert distil("recipe", write({**recipe, "runs": [plain]})).code == 0
    weights = [
        next(Path(run).glob("checkpoints/step-00000003/student/model.safetensors")).read_bytes()
        for run in ("plain", "teacher-seed1", "teacher-seed0")
    ]
    assert weights[0] == weights[1] != weights[2]


@pytest.fixture(scope="module")
def finished_sweep(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Path:
    """Return a folder with the recipe of one seed, and all that it makes."""
    folder = tmp_path_factory.mktemp("sweep")
    values = recipe_of(shards)
    for run in values["runs"]:
        run["sweep"]["train.seed"] = [0]
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    code, out, err = in_a_process("recipe", "recipe.yaml", cwd=folder)
    assert code == 0, out + err
    return folder


@pytest.fixture
def teachers(finished_sweep: Path, recipe: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Return the recipe with one seed only, finished."""
    shutil.copytree(finished_sweep, tmp_path, dirs_exist_ok=True)
    for run in recipe["runs"]:
        run["sweep"]["train.seed"] = [0]
    return recipe


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["runs.1.evaluation.rows=3"], "was measured on evaluation.rows 4, and this sweep on 3"),
        (
            ["runs.1.train.max_steps=4"],
            "holds the config.json of another run",
        ),
        (
            [
                "runs.0.output=others",
                "runs.0.sweep={b: {train.seed: 5}}",
                "runs.1.teacher=others-b",
            ],
            "teacher is another one",
        ),
    ],
)
def test_what_changed_is_not_taken_as_up_to_date(
    distil: Distil, teachers: dict[str, Any], changes: list[str], message: str
) -> None:
    before = {path: path.read_bytes() for path in Path().glob("student-*/*.json*")}
    code, _, err = distil("recipe", "recipe.yaml", *changes)
    assert code == 2 and message in err, err
    assert before == {path: path.read_bytes() for path in before}


def test_a_damaged_result_is_trained_again(distil: Distil, teachers: dict[str, Any]) -> None:
    result = Path("student-seed0-long/result.json")
    before = json.loads(result.read_bytes())["state"]["evaluation"]
    result.write_text('{"step": 3}')
    code, out, _ = distil("recipe", "recipe.yaml")
    assert code == 0 and "1 of 2 runs to train" in out
    assert json.loads(result.read_bytes())["state"]["evaluation"] == before


def test_a_run_that_fails_does_not_end_the_others(distil: Distil, recipe: dict[str, Any]) -> None:
    del recipe["runs"][1]
    recipe["runs"][0] |= {
        "keep_weights": False,
        "at_once": 1,
        "sweep": {"wild": {"optimizer.weight_decay": 100.0}, "calm": {"train.seed": 1}},
        "optimizer": {"warmup_ratio": 0.0, "learning_rate": 10.0},
        "train": {"max_steps": 60},
        "evaluation": {"every": 0},
    }
    code, out, _ = distil("recipe", write(recipe))
    assert code == 3, out
    assert re.search(r"wild: ended with code 3; teacher-wild/logs/sweep.log ends with error: ", out)
    assert "calm: finished, step 60" in out and "not finished: wild" in out
    assert not Path("teacher/table.csv").exists()


@pytest.mark.slow
def test_an_interrupted_sweep_continues_to_the_same_figures(
    distil: Distil, recipe: dict[str, Any]
) -> None:
    del recipe["runs"][1]
    recipe["runs"][0] |= {"keep_weights": False, "at_once": 2, "train": {"max_steps": 60}}
    assert distil("recipe", write(recipe)).code == 0
    expected = {path.parent.name: last_figures(str(path.parent)) for path in Path().glob("*/m*l")}

    recipe["runs"][0]["output"] = "again"
    argv = ("-m", "launch", "recipe", write(recipe))
    with warm.Process(*argv, stdout=subprocess.DEVNULL) as process:
        wait_for_a_step_of_both("again", process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=600) == 75
    assert not [*Path().glob("again-*/result.json")] and not Path("again/table.csv").exists()
    code, out, _ = distil("recipe", "recipe.yaml")
    assert code == 0 and "2 of 2 runs to train" in out
    for seed in (0, 1):
        assert last_figures(f"again-seed{seed}") == expected[f"teacher-seed{seed}"]


def test_a_file_of_logits_that_was_replaced_is_no_finished_sweep(
    distil: Distil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    task_data.make(tmp_path, "classification")
    task_data.save_model(tmp_path / "model", "bert", "classification")
    run = task_data.run_of(tmp_path, "classification", teacher=str(tmp_path / "model"))
    run |= {"objective": {"name": "kd"}, "student": {"architecture": "same", "init": [0]}}
    run["task"] |= {"logits": str(tmp_path / "logits.safetensors")}
    run |= {"sweep": {"train.seed": [0]}, "train": {**run["train"], "max_steps": 2}}
    assert distil("recipe", write({"runs": [run]})).code == 0
    assert "0 of 1 runs to train" in distil("recipe", "recipe.yaml").out
    (tmp_path / "logits.safetensors").write_bytes(b"x" * 37)
    code, out, err = distil("recipe", "recipe.yaml")
    assert code == 2 and "task.logits is another one" in err, out + err


@pytest.mark.slow
def test_runs_of_a_killed_sweep_end_and_the_same_command_continues(
    distil: Distil, recipe: dict[str, Any]
) -> None:
    del recipe["runs"][1]
    recipe["runs"][0] |= {"keep_weights": False, "at_once": 2, "train": {"max_steps": 300}}
    argv = ("-m", "launch", "recipe", write(recipe))
    stopped: dict[int, list[int]] = {}  # by seed: the first run must not end before the second's

    def both_have_begun() -> bool:
        for seed in (0, 1):
            run = Path(f"teacher-seed{seed}")
            log = run / "metrics.jsonl"
            # The first line is of step 0.
            if seed not in stopped and log.exists() and log.read_bytes().count(b"\n") > 1:
                stopped[seed] = writers(run / "logs/sweep.log")
                for pid in stopped[seed]:
                    os.kill(pid, signal.SIGSTOP)
        return len(stopped) == 2

    try:
        with warm.Process(*argv, stdout=subprocess.DEVNULL) as process:
            wait_until(both_have_begun, lambda: stopped, alive=lambda: process.poll() is None)
            process.send_signal(signal.SIGKILL)
            assert process.wait(timeout=600) == -signal.SIGKILL
    finally:
        for pid in itertools.chain(*stopped.values()):
            os.kill(pid, signal.SIGCONT)
    saved = lambda: len([*Path().glob("teacher-*/checkpoints/step-*/manifest.json")]) == 2  # noqa: E731
    wait_until(saved, lambda: "the runs go on")
    states = [
        json.loads(path.read_bytes()) for path in Path().glob("teacher-*/checkpoints/*/state.json")
    ]
    assert all(0 < state["step"] < 300 for state in states)
    wait_until(lambda: distil("recipe", "recipe.yaml").code == 0, lambda: "they stay locked")
    assert {last_figures(f"teacher-seed{seed}")["step"] for seed in (0, 1)} == {300}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("runs.0.sweep=[]", "runs.0.sweep: give lists of values"),
        ("runs.0.sweep={train.seed: 3}", "runs.0.sweep.train.seed: give a list of values"),
        (
            "runs.1.sweep={train.seed: [0], a: {train.sead: 1}}",
            "runs.1.sweep.seed0-a.train.sead",
        ),
        ("runs.1.sweep={train.seed: [0], optimizer.eps: [-1]}", "seed0-eps-1.optimizer.eps"),
        ("runs.0.sweep={train.seed: [1, 1]}", "two entries would be called 'seed1': give names"),
        ("runs.0.keep_weights=false", "runs.1.teacher teacher-seed0 is an entry of a sweep"),
        ("runs.1.keep_weights=maybe", "runs.1.keep_weights"),
        ("runs.0.at_once=0", "runs.0.at_once"),
        ("runs.0.sweep={train.seed: [0, 1], a: {train.seed: 5}}", "train.seed is set twice"),
        ("runs.0.sweep={train.seed: [0], train: {seed: [1]}}", "train.seed is set twice"),
        ("runs.0.sweep={a: {output: x}}", "sweep.output: each run has an output of its name"),
        ("runs.0.sweep={a: {shards: x}}", "sweep.shards: "),
        ("runs.0.sweep={train: {}}", "would be called ''"),
        ("runs.0.sweep={output: [a, b]}", "runs.0.sweep.output: each run has an output"),
        ("runs.0.output=null", "runs.0.output"),
        (
            "runs.1.sweep={train.seed: [0, 2]}",
            "teacher teacher is swept over train.seed: give this run the same sweep, or name an",
        ),
        (
            "runs.1={stage: export, output: exported, run: teacher}",
            "runs.1.run teacher is swept over train.seed: name an entry, such as teacher-seed0",
        ),
        (
            "runs.1={stage: export, output: exported, run: student-seed0-short}",
            "student-seed0-short: no checkpoint",
        ),
        ("runs.1.output=teacher-seed1", "have the output"),
        ("runs.0.checkpoint.keep=1000000000000", "its checkpoints need"),
    ],
)
def test_mistakes_are_found_before_anything_is_trained(
    distil: Distil, recipe: dict[str, Any], changes: str, message: str
) -> None:
    code, out, err = distil("recipe", write(recipe), changes)
    assert code == 2 and err.count("\n") == 1, out + err
    assert message in err
    assert [path.name for path in Path().iterdir()] == ["recipe.yaml"]


def test_other_spellings_of_a_swept_teacher_are_found(
    distil: Distil, recipe: dict[str, Any], tmp_path: Path
) -> None:
    for teacher in (tmp_path / "teacher", tmp_path / "teacher-seed0", "./x/../teacher-seed1"):
        code, _, err = distil(
            "recipe", write(recipe), "runs.0.keep_weights=false", f"runs.1.teacher={teacher}"
        )
        assert code == 2 and "keeps no weights: add keep_weights: true" in err
    # A slash at the end is no part of a name.
    code, out, _ = distil("recipe", "recipe.yaml", "runs.1.output=student/", "--dry-run")
    assert code == 0 and "student and 4 more" in out


def test_weights_that_others_keep_are_not_removed(distil: Distil, recipe: dict[str, Any]) -> None:
    """Sweep over a finished plain run, and over what a sweep has kept."""
    recipe["runs"] = recipe["runs"][:1]
    plain = {key: v for key, v in recipe["runs"][0].items() if key not in ("sweep", "keep_weights")}
    plain |= {"output": "teacher-seed0", "train": {"seed": 0}}
    assert distil("recipe", write({**recipe, "runs": [plain]})).code == 0
    for keep in (False, True, False):
        code, out, _ = distil("recipe", write(recipe), f"runs.0.keep_weights={keep}")
        assert code == 0 and "seed0: up to date" in out
        assert [*Path("teacher-seed0").rglob("model.safetensors")]
    assert [*Path("teacher-seed1").rglob("model.safetensors")]  # the second call has made them


def test_a_finished_sweep_needs_no_place(
    distil: Distil, teachers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=1000))
    assert distil("recipe", "recipe.yaml").code == 0
    code, _, err = distil("recipe", "recipe.yaml", "runs.1.output=other")
    assert code == 2 and "its checkpoints need" in err and "has 1,000 free" in err


def test_a_model_to_continue_is_compared(distil: Distil, recipe: dict[str, Any]) -> None:
    del recipe["runs"][1]["teacher"]
    recipe["runs"][1] |= {
        "objective": {"name": "mlm"},
        "model": {"init": "teacher"},
        "sweep": {"train.seed": [0]},
    }
    recipe["runs"][0]["sweep"]["train.seed"] = [0]
    assert distil("recipe", write(recipe)).code == 0
    for folder in Path().glob("teacher*"):
        shutil.rmtree(folder)
    code, out, err = distil("recipe", "recipe.yaml", "runs.0.optimizer.learning_rate=0.05")
    assert code == 2 and "model.init is another one" in err, out


def test_runs_share_gpus_where_their_micro_batches_are_given(
    recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Say that there are two GPUs; what runs there is only planned."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def places(**changes: Any) -> list[str]:
        entry = Recipe.model_validate({**recipe, "runs": [{**recipe["runs"][1], **changes}]}).runs[
            0
        ]
        assert isinstance(entry, SweepKeys)
        return [place["CUDA_VISIBLE_DEVICES"] for place in Sweep(entry)._places(How(None, False))]

    assert places() == places(at_once=2) == ["0", "1"] and places(at_once=1) == ["0"]
    for micro in ({}, {"micro_batch_size": "auto"}):
        with pytest.raises(RunError, match=r"at_once 3 lets runs share 2 GPU\(s\)"):
            places(at_once=3, train=micro)
    assert places(at_once=9, train={"micro_batch_size": 2}) == ["0", "1", "0", "1"]


def test_one_process_at_a_time_works_on_a_sweep(distil: Distil, recipe: dict[str, Any]) -> None:
    del recipe["runs"][1]
    Path("teacher").mkdir()
    with lock(Path("teacher"), "sweep"):
        code, _, err = distil("recipe", write(recipe))
    assert code == 2 and "another `distil recipe` (" in err, err
    assert not Path("teacher-seed0").exists()
    assert distil("recipe", "recipe.yaml").code == 0


def test_an_edited_result_is_not_believed(distil: Distil, teachers: dict[str, Any]) -> None:
    before = table("student")
    for result in Path().glob("student-*/result.json"):
        values = json.loads(result.read_bytes())
        values["state"]["evaluation"]["loss"] = 0.5
        result.write_text(json.dumps(values))
        (result.parent / "metrics.jsonl").unlink()
    code, out, _ = distil("recipe", "recipe.yaml")
    assert code == 0 and "2 of 2 runs to train" in out and table("student") == before
    for metrics in Path().glob("student-*/metrics.jsonl"):
        metrics.unlink()  # a sweep without curves has its table
    code, out, _ = distil("recipe", "recipe.yaml")
    assert code == 0 and "0 of 2 runs to train" in out and table("student") == before
    assert not Path("student/curves.svg").exists()


@pytest.mark.parametrize(
    ("objective", "axis", "compared"),
    [
        ("minilm", {"objective.relation_heads": [1, 4]}, False),
        ("minilm", {"student.num_layers": [1, 2]}, True),
        ("tinybert", {"student.num_layers": [1, 2]}, False),
        ("distilbert", {"objective.kl": [1.0, 5.0]}, True),
    ],
)
def test_terms_are_compared_where_they_are_the_same(
    distil: Distil,
    recipe: dict[str, Any],
    objective: str,
    axis: dict[str, Any],
    compared: bool,
) -> None:
    teacher = recipe["runs"][0]
    del teacher["sweep"], teacher["keep_weights"]
    student = {"output": "s", "teacher": "teacher", "objective": {"name": objective}, "sweep": axis}
    recipe["runs"][1] = student
    recipe["defaults"]["train"]["max_steps"] = 1
    code, out, err = distil("recipe", write(recipe))
    assert code == 0, out + err
    assert any(row["difference"] for row in table("s").values()) == compared
