"""Submit a run to a real Slurm of one host, signal it, and let it be queued again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.processes import (
    wait_until,
)

from pretrain.monitor.status import read_status

pytestmark = pytest.mark.slow


def test_a_run_saves_before_its_limit_and_its_job_is_queued_again(
    run: Path, tmp_path: Path, slurm: Callable[..., str]
) -> None:
    slurm(
        *("distil", "launch", str(run), "train.micro_batch_size=2", "train.max_steps=600"),
        *("--hardware", "cpu", "--gpus", "1", "--slurm", "slurm.partition=here"),
        *("slurm.time=30:00", "slurm.setup=[echo a line of setup]"),
    )
    job = slurm("squeue", "-h", "-o", "%i").strip()
    shown: Any = lambda: "".join(path.read_text() for path in tmp_path.glob("distil-run-*.log"))  # noqa: E731
    metrics = tmp_path / "out" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 5, shown)
    slurm("scancel", "--signal=USR1", job)  # what --signal=USR1@120 does before the limit
    wait_until(lambda: "PENDING" in slurm("squeue", "-h", "-o", "%T"), shown)
    status = read_status(tmp_path / "out")
    assert status is not None and (status["ended"], status["exit_code"]) == ("interrupted", 75)
    slurm("scontrol", "update", f"jobid={job}", "starttime=now")  # Slurm waits two minutes
    wait_until(lambda: not slurm("squeue", "-h", "-o", "%T"), shown)
    status = read_status(tmp_path / "out")
    assert status is not None and (status["ended"], status["step"]) == ("finished", 600), shown()
    assert shown().splitlines().count("a line of setup") == 2
