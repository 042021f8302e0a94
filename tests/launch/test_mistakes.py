"""Check that a mistake is answered before torch is imported, which takes seconds."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from data_prep.shards import load_manifest
from pretrain.config import RunConfig

# One process imports the command line; a fork of it runs each line of arguments.
CODE = """
import json, os, sys, traceback
import huggingface_hub, pyarrow, launch.checks, launch.recipe_config
from launch.cli import main
for line in sys.stdin:
    arguments, folder, file = json.loads(line)
    if not os.fork():
        screen = os.open(file, os.O_WRONLY | os.O_CREAT)
        os.dup2(screen, 1)
        os.dup2(screen, 2)
        os.chdir(folder)
        sys.argv[1:] = arguments
        try:
            main()
        except SystemExit as stop:
            large = [name for name in ("torch", "transformers") if name in sys.modules]
            print(stop.code, large, flush=True)
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.wait()
    print(flush=True)
"""
Check = Callable[..., None]


@pytest.fixture(scope="module")
def commands() -> Iterator[subprocess.Popen[str]]:
    argv, pipe = [sys.executable, "-c", CODE], subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        process.stdin.close()  # type: ignore[union-attr]


@pytest.fixture
def check_refused(commands: subprocess.Popen[str], tmp_path: Path) -> Check:
    """Return a function that runs `distil`, which must refuse without importing torch."""
    assert commands.stdin is not None and commands.stdout is not None

    def check(message: str, *arguments: str | Path) -> None:
        screen = tmp_path / "screen"
        screen.unlink(missing_ok=True)
        line = json.dumps([[str(word) for word in arguments], os.getcwd(), str(screen)])
        print(line, file=commands.stdin, flush=True)
        assert commands.stdout.readline() == "\n"
        said = screen.read_text(encoding="utf-8")
        assert message in said
        assert said.splitlines()[-1] == "2 []", said

    return check


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "wrong.yaml"
    path.write_text("output: out\nnonsense: 1\n", encoding="utf-8")
    return path


@pytest.fixture
def trained(shards: Path, tmp_path: Path, seal: Callable[[Path, Mapping[str, Any]], Path]) -> Path:
    """Write a run of 5 steps whose checkpoint holds its state.json alone."""
    train = {"max_steps": 5, "global_batch_size": 8, "micro_batch_size": 4}
    values = {"output": tmp_path, "shards": shards, "teacher": "t", "train": train}
    config = RunConfig.model_validate(values).model_dump(mode="json")
    digest = load_manifest(shards).digest
    state = {"step": 5, "config": config, "shards": digest, "num_processes": 1}
    seal(tmp_path / "trained", state)
    return tmp_path / "trained"


@pytest.mark.parametrize("command", ["prepare", "pretrain", "launch", "bench"])
def test_an_unknown_key_is_refused_without_torch(
    check_refused: Check, command: str, config: Path
) -> None:
    check_refused("unknown key nonsense", command, config)


@pytest.mark.parametrize("folder", ["none", "."], ids=["missing", "no run"])
@pytest.mark.parametrize("command", ["export", "replay", "evaluate"])
def test_a_folder_that_is_no_run_is_refused_without_torch(
    check_refused: Check, command: str, folder: str, config: Path, shards: Path
) -> None:
    run = config.parent / folder
    rest = {"export": [run / "out"], "replay": ["--step", "1"], "evaluate": [shards]}[command]
    missing = f"there is no {run / 'config.json'}" if command == "evaluate" else "no checkpoint"
    check_refused(f"{run}: {missing}", command, run, *rest)


def test_missing_shards_are_refused_without_torch(
    check_refused: Check, trained: Path, tmp_path: Path
) -> None:
    message = f"{tmp_path} holds no finished shards"
    check_refused(message, "evaluate", trained, tmp_path)
    check_refused(message, "replay", trained, "--step", "1", "--shards", tmp_path)
    check_refused(message, "pretrain", "shipped:demo.yaml", f"shards={tmp_path}")
    check_refused(message, "launch", "shipped:demo.yaml", f"shards={tmp_path}")


@pytest.mark.parametrize("name", ["nobody/nothing", "a b"], ids=["unreachable", "no name"])
def test_a_model_that_is_nowhere_is_refused_without_torch(
    check_refused: Check, name: str, shards: Path, tmp_path: Path
) -> None:
    config = tmp_path / "run.yaml"
    values = {"output": str(tmp_path / "out"), "shards": str(shards), "teacher": name}
    config.write_text(json.dumps({"runs": [values]}), encoding="utf-8")
    check_refused(f"teacher {name}: no such folder here, and the hub", "recipe", config)
    config.write_text(json.dumps(values), encoding="utf-8")
    for command in ("pretrain", "launch"):
        check_refused(f"teacher {name}: no such folder here, and the hub", command, config)
    if "/" in name:  # as a folder's, the other name is missing here
        check_refused(f"model {name}: no such folder here, and the hub", "evaluate", name, shards)


def test_another_recipe_than_the_checkpoints_is_refused_without_torch(
    check_refused: Check,
    shards: Path,
    tmp_path: Path,
    seal: Callable[[Path, Mapping[str, Any]], Path],
) -> None:
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    (teacher / "config.json").touch()
    values = {"output": tmp_path / "run", "shards": shards, "teacher": str(teacher)}
    values |= {"train": {"max_steps": 5, "global_batch_size": 8}}
    config = RunConfig.model_validate(values)
    recorded = config.model_dump(mode="json")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps(recorded), encoding="utf-8")
    state = {"step": 5, "config": recorded, "shaping": config.shaping(), "num_processes": 1}
    seal(tmp_path / "run", state)
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(recorded), encoding="utf-8")
    message = "was made by another run: train.max_steps was 5 and is now 6. Revert the change"
    for command in ("pretrain", "launch"):
        check_refused(message, command, path, "train.max_steps=6")


def test_a_missing_teacher_is_refused_without_torch(
    check_refused: Check, trained: Path, shards: Path, tmp_path: Path
) -> None:
    teacher = tmp_path / "none"
    message = f"teacher {teacher}: there is no {teacher / 'config.json'}; check the path"
    check_refused(message, "evaluate", trained, shards, "--teacher", teacher)
    for command in ("pretrain", "launch"):
        settings = [f"shards={shards}", f"teacher={teacher}"]
        check_refused(message, command, "shipped:demo.yaml", *settings)


@pytest.mark.parametrize("command", ["pretrain", "launch"])
def test_a_batch_that_does_not_divide_is_refused_without_torch(
    check_refused: Check, command: str, shards: Path
) -> None:
    settings = [
        f"shards={shards}",
        "teacher=a/hub-name",
        "train.global_batch_size=10",
        "train.micro_batch_size=4",
    ]
    message = "train.global_batch_size 10 is not a multiple of micro_batch_size 4 x 1 process(es)"
    check_refused(message, command, "shipped:demo.yaml", *settings)


def test_an_unknown_preset_is_refused_without_torch(check_refused: Check) -> None:
    message = "--hardware nonsense: not known: one of cpu"
    check_refused(message, "launch", "shipped:demo.yaml", "--hardware", "nonsense")


def test_a_bad_step_is_refused_without_torch(check_refused: Check, trained: Path) -> None:
    message = "there is no step 6; the run has steps 1 to 5"
    check_refused(message, "replay", trained, "--step", "6")


def test_a_bad_target_or_repository_is_refused_without_torch(
    check_refused: Check, trained: Path
) -> None:
    check_refused("already there", "export", trained, trained)
    check_refused("not NAME or OWNER/NAME", "export", trained, trained / "out", "--push", "a/b/c")
