"""Provide a corpus and a run so small that starting the processes takes longer than training."""

import os
import random
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from string import ascii_lowercase
from time import sleep
from typing import Any

import pytest
import yaml
from support.processes import (
    DISTIL,
    ROOT,
    finished,
    outside_slurm,
    programs,
    unused_port,
    wait_until,
)
from support.small_corpora import LETTERS, corpus_values, write

from data_prep.config import CorpusConfig
from data_prep.prepare import prepare

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


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of shards: rows of 16 single letters, a tenth for validation."""
    folder = tmp_path_factory.mktemp("letters")
    draw = random.Random(6)
    lines = [" ".join(draw.choices(ascii_lowercase, k=draw.randint(4, 30))) for _ in range(200)]
    (folder / "letters.txt").write_text("\n\n".join(lines), encoding="utf-8")
    source = {"kind": "text", "path": str(folder / "letters.txt"), "document": "paragraph"}
    values = corpus_values(folder, LETTERS, source, row_length=16, min_characters=1)
    write(folder / "letters.yaml", values)
    prepare(CorpusConfig.model_validate(values))
    return folder / "shards"


@pytest.fixture(scope="session")
def run_values(shards: Path) -> dict[str, Any]:
    """Return the config of four steps of 8 rows for a BERT of one layer."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    batches = {"global_batch_size": 8, "micro_batch_size": 2, "num_workers": 0}
    return {
        "shards": str(shards),
        "objective": {"name": "mlm"},
        "model": {**sizes, "intermediate_size": 32, "max_position_embeddings": 16},
        "train": {"max_steps": 4, "precision": "fp32", **batches},
        "evaluation": {"every": 0, "rows": 4},
        "logging": {"every": 1},
    }


@pytest.fixture
def run(tmp_path: Path, run_values: dict[str, Any]) -> Path:
    """Write the config of the tiny run, whose output is `out`."""
    return write(tmp_path / "run.yaml", {"output": str(tmp_path / "out"), **run_values})


@pytest.fixture
def own_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the shipped recipe at tiny size; the working directory is empty."""
    monkeypatch.chdir(tmp_path)
    shipped = ROOT / "configs" / "own-encoder.yaml"
    values: dict[str, Any] = yaml.safe_load(shipped.read_text(encoding="utf-8"))
    prepare, teacher, *_ = values["runs"]
    prepare["sources"][0] |= {"fraction": 0.04}
    prepare |= {"tokenizer": {"train": {"kind": "wordpiece", "vocab_size": 400}}, "workers": 1}
    teacher["model"] |= {"hidden_size": 16, "intermediate_size": 32}
    values["defaults"]["train"] = {"max_steps": 2, "global_batch_size": 4, "precision": "fp32"}
    return values


@pytest.fixture(scope="session")
def save_teacher() -> Callable[..., Path]:
    """Return a function that writes a BERT of two layers, by default over LETTERS."""

    def write(folder: Path, words: Sequence[str] = LETTERS, positions: int = 16) -> Path:
        from transformers import BertConfig, BertForMaskedLM

        config = BertConfig(
            vocab_size=len(words),
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=positions,
        )
        BertForMaskedLM(config).save_pretrained(folder)
        (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
        return folder

    return write


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Start a cluster of this host in a folder; return the environment of its users."""
    if os.geteuid() != 0 or any(shutil.which(name) is None for name in DAEMONS):
        pytest.skip("needs Slurm and munge, and to be root: apt-get install slurm-wlm munge")
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
        # Jobs of a test that failed would outlive their daemons.
        subprocess.run(["scancel", "--full", "--signal=KILL", "--user=root"], env=environment)
        for process in reversed(started):
            process.terminate()
            process.wait(60)


@pytest.fixture
def slurm(cluster: dict[str, str], tmp_path: Path) -> Callable[..., str]:
    """Return a function that runs a command of a user of the cluster in `tmp_path`."""
    environment = cluster | {
        "PATH": programs(tmp_path / "bin", distil=DISTIL),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }

    def run(*command: str) -> str:
        done = finished(*command, env=environment, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    wait_until(lambda: "idle" in run("sinfo", "-h", "-o", "%T"), lambda: run("sinfo"))
    return run
