"""`distil launch` for real, with two processes on the CPU; and what it shows is what runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.cli import main

ROOT = Path(__file__).parents[2]


def steps(run: Path) -> list[int]:
    lines = (run.parent / "out" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return [record["step"] for record in records if "grad_norm" in record]


def test_a_launch_stops_and_the_command_it_shows_goes_on(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["launch", str(run), "--hardware", "cpu", "--gpus", "2", "train.micro_batch_size=2"]
    done = subprocess.run(
        [sys.executable, "-m", "launch", *asked, "--stop-after", "2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 rows x 2 micro-batches x 2 process(es), fp32" in done.stdout
    assert steps(run) == [1, 2]

    monkeypatch.setattr(sys, "argv", ["distil", *asked, "--dry-run"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code and steps(run) == [1, 2]
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line[0] != "#"]
    assert line in done.stdout.replace(" --stop-after 2", "")
    plain = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "PYTHONPATH": str(ROOT)}
    shell = subprocess.run(
        ["bash", "-c", line],
        cwd=run.parent,
        env=plain,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert shell.returncode == 0, shell.stdout + shell.stderr
    assert steps(run) == [1, 2, 3, 4]
