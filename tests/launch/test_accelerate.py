"""Start a run with `accelerate launch` and the files in launch/accelerate."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from support.processes import ROOT, finished

CPU = ROOT / "launch" / "accelerate" / "cpu.yaml"


def losses(output: Path) -> list[float]:
    """Return the loss of each optimizer step."""
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record["mlm"] for record in map(json.loads, lines) if "grad_norm" in record]


@pytest.mark.slow
def test_the_command_in_the_file_trains_with_two_ranks(run: Path, tmp_path: Path) -> None:
    found = re.search(r"#     (CUDA.*\\)\n#         (.*CONFIG)\n", CPU.read_text(encoding="utf-8"))
    assert found is not None
    words = shlex.split(found[1].rstrip("\\") + found[2])
    assert words[2:4] == ["accelerate", "launch"] and words[-1] == "CONFIG"
    accelerate = [sys.executable, "-m", "accelerate.commands.launch", *words[4:-1]]
    one_rank = [sys.executable, "-m", "launch", "pretrain"]
    for command, name in ((accelerate, "two"), (one_rank, "one")):
        # Dropout draws other numbers in another layout.
        overrides = ["model.hidden_dropout_prob=0", "model.attention_probs_dropout_prob=0"]
        arguments = [*command, run, f"output={tmp_path / name}", *overrides]
        # The file is named relative to the checkout.
        done = finished(*arguments, cwd=ROOT, environment={"CUDA_VISIBLE_DEVICES": ""})
        assert done.returncode == 0, done.stdout + done.stderr
    states = [
        json.loads((tmp_path / name / "checkpoints/step-00000004/state.json").read_bytes())
        for name in ("two", "one")
    ]
    assert [state["num_processes"] for state in states] == [2, 1]
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    assert len(losses(tmp_path / "one")) == 4
