"""The README's commands run, in its order, beside the shipped configs; only shortened."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import yaml

README = Path(__file__).parents[1] / "README.md"
ROW_LENGTH = 32  # of configs/corpus-demo.yaml
# The same files and the same road, but a small part of the text and a few steps.
SHORTER = {
    "prepare": ["sources.0.max_megabytes=0.2", "tokenizer.train.vocab_size=1000"],
    "pretrain": ["train.max_steps=2", "evaluation.rows=8"],
    "evaluate": ["--rows", "8"],
}


def test_every_command_of_the_three_jobs_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    commands = [shlex.split(line, comments=True) for line in lines]
    ours = [command for command in commands if command[0] == "distil"]
    assert {command[1] for command in ours} >= {"prepare", "pretrain", "export"}
    (tmp_path / "configs").symlink_to(README.with_name("configs"))
    environment = {**os.environ, "PYTHONPATH": str(README.parent), "HF_HUB_OFFLINE": "1"}
    for command in ours:
        arguments = [*command[1:], *SHORTER.get(command[1], [])]
        result = subprocess.run(
            [sys.executable, "-m", "launch", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert result.returncode == 0, f"{command}: {result.stdout}{result.stderr}"
    assert (tmp_path / "exported" / "my-distilbert" / "model.safetensors").is_file()


def test_the_demo_has_steps_for_five_minutes_on_the_slower_machine() -> None:
    """The promise against speeds measured in fp32 on two cores of a Xeon."""
    seconds = 60.0  # corpus, imports, evaluations, exports
    for name, tokens_per_second in (("demo-teacher", 4200), ("demo", 3500)):
        config = yaml.safe_load((README.parent / "configs" / f"{name}.yaml").read_text("utf-8"))
        rows = config["train"]["max_steps"] * config["train"]["global_batch_size"]
        seconds += rows * ROW_LENGTH / tokens_per_second
    assert seconds <= 0.85 * 300


def test_the_make_targets_it_names_exist() -> None:
    makefile = README.with_name("Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"make (\w[\w-]*)", README.read_text(encoding="utf-8")))
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    assert {"demo", "test"} <= named <= targets
