"""Submit a run to a real Slurm of one host, signal it, and let it be queued again."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from time import sleep
from typing import Any

import pytest
from support.processes import (
    DISTIL,
    ROOT,
    finished,
    outside_slurm,
    programs,
    unused_port,
    wait_until,
)

from pretrain.monitor.status import read_status

DAEMONS = ("munged", "slurmctld", "slurmd")
CONF = """ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
ReturnToService=2
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SchedulerParameters=sched_interval=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} RealMemory=2000 State=UNKNOWN
PartitionName=here Nodes=ALL Default=YES State=UP
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or any(shutil.which(name) is None for name in DAEMONS),
        reason="needs Slurm and munge, and to be root: apt-get install slurm-wlm munge",
    ),
]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Start a cluster of this host in a folder; return the environment of its users."""
    folder, ports = tmp_path / "slurm", [unused_port() for _ in range(2)]
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    host = socket.gethostname().partition(".")[0]
    text = CONF.format(folder=folder, host=host, ports=ports, cores=os.cpu_count())
    (folder / "slurm.conf").write_text(text, encoding="utf-8")
    environment = outside_slurm() | {"SLURM_CONF": str(folder / "slurm.conf")}
    munge = {f"{name}-file": folder / f"munge.{name}" for name in ("key", "pid", "log", "seed")}
    options = [f"--{name}={file}" for name, file in munge.items()]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for command in (
            ["munged", "--foreground", "--force", f"--socket={folder}/munge.sock", *options],
            ["slurmctld", "-D", "-c"],
            ["slurmd", "-D", "-c"],
        ):
            with (folder / f"{command[0]}.out").open("wb") as out:
                started.append(
                    subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
                )
            sleep(1)
        yield environment
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(60)


def test_a_run_saves_before_its_limit_and_its_job_is_queued_again(
    run: Path, tmp_path: Path, cluster: dict[str, str]
) -> None:
    environment = cluster | {
        "PATH": programs(tmp_path / "bin", distil=DISTIL),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }

    def slurm(*command: str) -> str:
        done = finished(*command, env=environment, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    wait_until(lambda: "idle" in slurm("sinfo", "-h", "-o", "%T"), lambda: slurm("sinfo"))
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
