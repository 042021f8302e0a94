"""Read what trackers have written, with the packages' own formats, and a run's log."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import warm
from support.processes import wait_until
from support.runs import history, start, write_yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

from pretrain import RunError
from pretrain.monitor.report import report

BLOCK, HEADER = 2**15, 7  # bytes of a .wandb file: LevelDB's log format, after a header


Settings = Callable[..., dict[str, Any]]


@pytest.fixture
def values(tmp_path: Path, run_config: Settings, teacher_folder: Path) -> dict[str, Any]:
    """Return four steps, each with a line of metrics, for both trackers."""
    return run_config(
        tmp_path / "run",
        teacher_folder,
        student={"num_layers": 2},
        train={"max_steps": 4, "global_batch_size": 4, "micro_batch_size": 4},
        logging={"every": 1, "trackers": ["tensorboard", "wandb"]},
    )


def records(path: Path) -> list[Any]:
    """Return the records of a W&B run that was written offline."""
    data, at, found, part = path.read_bytes(), HEADER, [], b""
    while at + HEADER < len(data):
        if BLOCK - at % BLOCK < HEADER:  # the rest of a block is padding
            at += BLOCK - at % BLOCK
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        part += data[at + HEADER : at + HEADER + size]
        at += HEADER + size
        if kind in (1, 4):  # whole, or the last part
            found.append(Record.FromString(part))
            part = b""
    return found


def test_both_trackers_get_the_metrics_and_a_resumed_run_goes_on(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    start(values, stop_after=2)
    # W&B names a folder by the second, and would write the first one again.
    begun = int(time.time())
    wait_until(lambda: int(time.time()) > begun, lambda: "the clock stands still")
    start(values)
    expected = {e["step"]: e["kl"] for e in history(values["output"]) if e["kind"] == "train"}
    assert [*expected] == [1, 2, 3, 4]
    output = Path(values["output"])

    logged = {}
    for file in output.rglob("events.out.tfevents.*"):
        points = EventAccumulator(str(file)).Reload().Scalars("train/kl")
        logged |= {point.step: point.value for point in points}
    assert logged == pytest.approx(expected, rel=1e-6)

    found, names = {}, set()
    for file in output.glob("wandb/*/run-*.wandb"):
        names.add(file.stem)
        for record in records(file):
            if record.HasField("history"):
                row = {
                    item.key or ".".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
                if "train/kl" in row:
                    found[row["_step"]] = row["train/kl"]
            if record.HasField("run"):
                assert (record.run.project, record.run.display_name) == ("distil", output.name)
    assert found == pytest.approx(expected) and len(names) == 1


def test_wandb_without_a_key_is_refused_before_the_run_begins(
    values: dict[str, Any], tmp_path: Path
) -> None:
    ours = {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none")}
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")} | ours
    command = [warm.python(), "-m", "launch", "pretrain", str(write_yaml(values))]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 2, ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert "error: logging.trackers: wandb: No API key" in last and "WANDB_MODE=offline" in last
    output = Path(values["output"])
    assert not (output / "metrics.jsonl").exists()
    log = (output / "logs" / "pretrain.log").read_text(encoding="utf-8")
    assert "error: logging.trackers: wandb: No API key" in log
    with pytest.raises(RunError, match=r"failed before its first step: logging\.trackers"):
        report(output)


def test_a_run_in_one_process_keeps_what_it_says(values: dict[str, Any]) -> None:
    values["logging"]["trackers"] = []
    command = [warm.python(), "-m", "launch", "pretrain", str(write_yaml(values))]
    command += ["slurm.setup=[export KEY=canary]"]  # of a job: no file of the run keeps it

    def distil(*options: str) -> list[str]:
        ended = subprocess.run([*command, *options], capture_output=True, text=True, timeout=600)
        assert ended.returncode == 0, ended.stderr
        return [line for line in ended.stdout.splitlines() if not line.startswith("config: ")]

    log = Path(values["output"]) / "logs" / "pretrain.log"
    said = distil("--stop-after", "1")
    first = log.read_text(encoding="utf-8")

    def holds(kept: list[str], shown: list[str]) -> bool:
        """Return whether lines are those of the screen, of steps with all that did not fit."""
        pairs = [*zip(kept, shown, strict=True)]
        whole = [(a, b) for a, b in pairs if "  step " in b]
        assert whole and all(f"  {term} " in a for a, _ in whole for term in ("kl", "mlm", "lr"))
        return all({*b.split("  ")} <= {*a.split("  ")} for a, b in whole) and all(
            a == b for a, b in pairs if "  step " not in b
        )

    assert holds(first.splitlines()[1:], said) and any("step 1/4" in line for line in said)
    more = distil()
    both = log.read_text(encoding="utf-8").splitlines()
    assert both[: len(said) + 1] == first.splitlines()
    assert holds(both[len(said) + 2 :], more)
    assert both[0].endswith("--stop-after 1") and "distil export" in both[-1]
    files = [path for path in Path(values["output"]).rglob("*") if path.is_file()]
    assert not [path for path in files if b"canary" in path.read_bytes()]
