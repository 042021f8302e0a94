"""Add a task: its folder (tests/toy), which no list names; then train, resume and export it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.processes import ROOT, finished

STEPS = 20


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the packages with the toy's folder."""
    folder = tmp_path_factory.mktemp("tree")
    for name in ("data_prep", "launch"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copytree(
        ROOT / "pretrain", folder / "pretrain", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copytree(ROOT / "tests" / "toy", folder / "pretrain" / "tasks" / "toy")
    (folder / "pretrain" / "tasks" / "toy" / "__init__.py").touch()
    return folder


# One process for all: it takes seconds to import torch.
COMMANDS = """
import json, sys
from launch.cli import main
for arguments in json.loads(sys.argv[1]):
    sys.argv[1:] = arguments
    try:
        main()
    except SystemExit as stop:
        assert not stop.code, arguments
"""


def distil(tree: Path, *commands: list[object]) -> None:
    arguments = json.dumps([[*map(str, command)] for command in commands])
    result = finished(
        *(sys.executable, "-c", COMMANDS, arguments),
        cwd=tree,
        environment={"PYTHONPATH": str(tree)},
    )
    assert result.returncode == 0, result.stdout + result.stderr


def tensors(run: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a run's last checkpoint, by file and name."""
    folder = run / "checkpoints" / f"step-{STEPS:08d}"
    files = sorted(folder.rglob("*.safetensors"))
    found = {f"{f.name} {key}": t for f in files for key, t in load_file(f).items()}
    assert any("classifier" in name for name in found)
    return found


def test_a_task_is_one_folder(tree: Path, corpus: Path, tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    values: dict[str, Any] = {
        "shards": str(corpus),
        "objective": {"name": "labels"},
        "model": {**sizes, "intermediate_size": 32},  # with dropout
        "optimizer": {"learning_rate": 0.01},
        "train": {"max_steps": STEPS, "global_batch_size": 16, "micro_batch_size": 8},
        "evaluation": {"every": 0},
        "logging": {"every": 1},
    }
    config = tmp_path / "toy.yaml"
    config.write_text(json.dumps(values | {"output": str(tmp_path / "whole")}))
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    distil(
        tree,
        ["pretrain", config],
        ["pretrain", config, f"output={halves}", "--stop-after", 9],
        ["pretrain", config, f"output={halves}"],
        ["export", whole, tmp_path / "exported"],
    )
    ours, theirs = tensors(whole), tensors(halves)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)

    lines = (whole / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [entry["classes"] for entry in map(json.loads, lines) if entry["kind"] == "train"]
    assert len(losses) == STEPS and sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert json.loads((whole / "config.json").read_bytes())["objective"] == {"name": "labels"}

    classifier = load_file(tmp_path / "exported" / "classifier.safetensors")
    for name, tensor in classifier.items():
        assert torch.equal(tensor, ours[f"adapters.safetensors {name}"])
    assert (tmp_path / "exported" / "model.safetensors").is_file()
    card = (tmp_path / "exported" / "README.md").read_text(encoding="utf-8")
    assert "Trained with 1 x " in card and "masked language" not in card


def test_an_objective_of_another_task_is_refused(tree: Path, tmp_path: Path) -> None:
    code = (
        "from pretrain.config import RunConfig\n"
        "RunConfig(output='o', shards='s', objective={'name': 'labels'}, task={'name': 'mlm'})"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(tree)},
        cwd=tree,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "objective labels is for task toy, not mlm: set task.name" in result.stderr
