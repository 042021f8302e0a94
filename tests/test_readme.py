"""Run the README's commands in their order after the demo, with fewer steps."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from launch.cli import COMMANDS

README = Path(__file__).parents[1] / "README.md"


def shortened(command: list[str]) -> list[str]:
    """Return a command with the limits of `distil demo --quick`, whose files it continues."""
    if command[1] == "prepare":
        return [*command, "sources.0.max_megabytes=0.2"]
    if command[1] == "evaluate":
        return [*command, "--rows", "8"]
    if command[1] in ("pretrain", "launch"):
        command = [word for word in command if not word.startswith("train.max_steps")]
        return [*command, "train.max_steps=15", "evaluation.rows=64", "evaluation.every=0"]
    return command


@pytest.mark.slow
def test_every_command_of_the_readme_runs_after_the_demo(
    tmp_path: Path, distil: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    lines = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    commands = [line for line in lines if line[0] == "distil"]
    shown = {command[1] for command in commands}
    assert shown | {"demo"} == {command.__name__ for command in COMMANDS}
    (tmp_path / "configs").symlink_to(README.with_name("configs"))
    monkeypatch.chdir(tmp_path)
    demo = ["distil", "demo", "--quick", "--output", "runs/demo"]
    outputs = {}
    for command in [demo, *map(shortened, commands)]:
        code, outputs[" ".join(command[1:3])], err = distil(*command[1:])
        assert code == 0, f"{command}: {outputs}{err}"
    for finished in ("prepare configs/corpus-demo.yaml", "pretrain configs/demo-alone.yaml"):
        assert "up to date" in outputs[finished]
    assert (tmp_path / "exported" / "student" / "model.safetensors").is_file()


def test_make_targets_of_the_readme_exist() -> None:
    makefile = README.with_name("Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"make (\w[\w-]*)", README.read_text(encoding="utf-8")))
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    assert {"demo", "test"} <= named <= targets
