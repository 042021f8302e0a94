"""Check `distil report` against the files of real runs: alive, finished, failed and elsewhere."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file
from support import warm
from support.runs import RECIPE, start, step_folder

from data_prep.messages import duration

Settings = Callable[..., dict[str, Any]]
SIX = RECIPE | {"train": {**RECIPE["train"], "max_steps": 6}}
LONG = {**RECIPE["train"], "max_steps": 100_000}


def shown(distil: Any, *runs: Path) -> list[str]:
    code, out, err = distil("report", *runs)
    assert code == 0, err
    lines: list[str] = out.splitlines()
    assert all(len(line) <= 80 or "/" in line for line in lines)
    return lines


def test_a_finished_run_is_told_from_its_files(
    tmp_path: Path,
    teacher_folder: Path,
    run_config: Settings,
    distil: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Path("run")  # a long path is divided at its hyphens
    start(run_config(run, teacher_folder, **SIX))
    lines = shown(distil, run)
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [entry for entry in entries if entry["kind"] == "train"][-1]
    measured = [entry for entry in entries if entry["kind"] == "evaluation"][-1]
    text = " ".join(" ".join(lines).split())
    assert text.startswith(f"{run}: finished step 6 of 6 (100%) at step 6: loss")
    assert f"loss {trained['loss']:.4g}, kl {trained['kl']:.4g}" in text
    assert f"teacher accuracy {measured['teacher_accuracy']:.4g}" in text
    assert "newest checkpoint: step 6" in text and "left" not in text and "error" not in text
    assert "of memory last line: 20" in text

    student = step_folder(run, 6) / "student"
    num = sum(p.numel() for p in load_file(student / "model.safetensors").values())
    assert f"step 6, {num:,} parameters" in text


def test_a_run_that_has_not_begun_hides_no_other(
    tmp_path: Path, teacher_folder: Path, run_config: Settings, distil: Any
) -> None:
    start(run_config(tmp_path / "run", teacher_folder, **RECIPE))
    code, out, err = distil("report", tmp_path / "run", tmp_path / "later")
    assert code == 0 and "step 4 of 4" in out and "later: no run has begun there" in out, err


def test_a_running_and_a_killed_run_are_told_apart(
    tmp_path: Path, teacher_folder: Path, run_config: Settings, distil: Any
) -> None:
    run, file = tmp_path / "run", tmp_path / "run.yaml"
    values = run_config(run, teacher_folder, **(RECIPE | {"train": LONG}))
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = warm.Process("-m", "launch", "pretrain", file, **quiet)
    try:
        end = time.monotonic() + 600
        file = run / "metrics.jsonl"
        while not file.exists() or file.read_bytes().count(b'"kind": "train"') < 3:
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.1)
        joined = " ".join(" ".join(shown(distil, run)).split())
        assert f"running (host {socket.gethostname()}, pid {process.real})" in joined
        assert "of 100,000" in joined and " left" in joined
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert "ended without a word" in " ".join(" ".join(shown(distil, run)).split())


def test_a_failed_run_shows_its_error_and_another_machine_is_not_asked(
    tmp_path: Path, teacher_folder: Path, run_config: Settings, distil: Any
) -> None:
    run = tmp_path / "run"
    start(run_config(run, teacher_folder, **SIX))
    status = json.loads((run / "exit_status.json").read_text())
    status |= {"ended": "failed", "error": "loss is nan at step 2"}
    (run / "exit_status.json").write_text(json.dumps(status))
    assert "  error: loss is nan at step 2" in shown(distil, run)
    lock = max(run.glob("pretrain.*.lock"))
    record = json.loads(lock.read_bytes()[:1024])
    lock.write_bytes(json.dumps(record | {"host": "elsewhere"}).encode().ljust(1024))
    assert "run: failed" in " ".join(" ".join(shown(distil, run)).split())
    (run / "exit_status.json").unlink()
    assert "unknown (host elsewhere" in " ".join(" ".join(shown(distil, run)).split())


def test_a_folder_without_a_run_is_refused(tmp_path: Path, distil: Any) -> None:
    code, _, err = distil("report", tmp_path)
    assert code == 2 and "no run has begun there" in err
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    code, _, err = distil("report", tmp_path)
    assert code == 2 and "config.json: cannot be read as the config of a run" in err


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(45, "45 s"), (600, "10 min"), (12_000, "3.3 h"), (187_200, "52.0 h"), (864_000, "10.0 days")],
)
def test_a_time_is_said_as_people_say_it(seconds: float, text: str) -> None:
    assert duration(seconds) == text
