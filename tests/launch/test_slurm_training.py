"""Run a job's script: a signal before the time limit saves, and the requeued job continues."""

import json
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from support.processes import DISTIL, ROOT, outside_slurm, programs, wait_until

from pretrain.monitor.status import read_status

# Runs a job at once, as Slurm would later, and once more each time it was queued again.
SBATCH = """#!/bin/bash
cat > "$LOG.script"
echo "sbatch" >> "$LOG"
export SLURM_JOB_NUM_NODES=$(sed -n 's/#SBATCH --nodes=//p' "$LOG.script")
export SLURM_JOB_ID=4711 SLURM_JOB_NODELIST=n1
for ((SLURM_RESTART_COUNT = 0; SLURM_RESTART_COUNT < 3; SLURM_RESTART_COUNT++)); do
    export SLURM_RESTART_COUNT
    rm -f "$LOG.requeue"
    bash "$LOG.script" > "$LOG.$SLURM_RESTART_COUNT" 2>&1
    echo "ended $?" >> "$LOG"
    [[ -e $LOG.requeue ]] || break
done
"""
SRUN = """#!/bin/bash
echo "srun $*" >> "$LOG"
while [[ $1 == --* ]]; do shift; done
export SLURM_NODEID=0 SLURM_STEP_ID=0
echo $$ > "$LOG.step"
exec "$@"
"""
SCONTROL = """#!/bin/bash
[[ $1 == show ]] && echo n1 && exit
echo "scontrol $*" >> "$LOG"
touch "$LOG.requeue"
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
def test_a_signal_saves_and_the_requeued_job_continues(run: Path, tmp_path: Path) -> None:
    scripts = {"sbatch": SBATCH, "srun": SRUN, "scontrol": SCONTROL, "distil": DISTIL}
    kept = outside_slurm() | {"PATH": programs(tmp_path / "bin", **scripts)}
    kept |= {"PYTHONPATH": str(ROOT), "LOG": str(tmp_path / "log")}
    options = ["train.micro_batch_size=2", "train.num_workers=1", "train.max_steps=300"]
    options += ["--hardware", "cpu", "--gpus", "2", "--grace", "50", "--slurm"]
    command = [sys.executable, "-m", "launch", "launch", str(run), *options]
    job = subprocess.Popen(
        command, cwd=tmp_path, env=kept, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        signal_the_step(tmp_path, after=5)
        shown, _ = job.communicate(timeout=600)
    finally:
        if job.poll() is None:
            job.kill()
    output = "".join(path.read_text() for path in sorted(tmp_path.glob("log.[0-9]")))
    assert job.returncode == 0, shown + output
    script = (tmp_path / "log.script").read_text()
    assert "#SBATCH --job-name=distil-run\n#SBATCH --nodes=1\n" in script
    lines = (tmp_path / "log").read_text().splitlines()
    begun = f"srun --kill-on-bad-exit=0 --cpus-per-task=2 distil launch {run} "
    assert [re.sub(r"^(srun .* distil launch \S+ ).*", r"\1", line) for line in lines] == [
        "sbatch",
        *(begun, "scontrol requeue 4711", "ended 75"),
        *(begun, "ended 0"),
    ], output
    assert lines[1] == lines[4]  # the same command
    status = read_status(tmp_path / "out")
    assert status is not None and status["launch"].startswith("4711.1.0-")
    assert (status["ended"], status["step"]) == ("finished", 300)
    text = (tmp_path / "out" / "metrics.jsonl").read_text(encoding="utf-8")
    records = [json.loads(line) for line in text.splitlines()]
    assert [r["step"] for r in records if "grad_norm" in r] == list(range(1, 301))


def signal_the_step(folder: Path, *, after: int) -> None:
    """Send SIGUSR1 to every process of the step, as Slurm does, once `after` steps are done."""
    metrics = folder / "out" / "metrics.jsonl"
    wait_until(metrics.exists, metrics.exists)
    wait_until(lambda: len(metrics.read_text().splitlines()) >= after, metrics.read_text)
    step = psutil.Process(int((folder / "log.step").read_text()))
    for process in [step, *step.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGUSR1)
