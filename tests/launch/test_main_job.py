"""Do the main job on two nodes: lose one in the second step, continue, export, fill masks.

A part of the suite at tiny size. The record of docs/results/main-job.md is of the same code:

    PYTHONPATH=tests python tests/launch/test_main_job.py FILE

It distils six layers of a real teacher of 12 x 256, with 4,096 rows of 64 in a step, and appends
the figures to FILE, which takes half an hour on two cores.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
import yaml
from safetensors.numpy import load_file
from support.nodes import history, screens, two_nodes, whole_checkpoints
from support.processes import ROOT, finished, in_a_process, wait_until
from support.small_corpora import write
from transformers import pipeline

from data_prep.config import CorpusConfig
from data_prep.prepare import prepare
from pretrain.monitor.records import append_record, row

RECORD = Path(os.environ["RECORD"]) if "RECORD" in os.environ else None
STEPS, LONG = 3, 3600  # LONG: seconds, only a deadlock reaches it
TEACHER = "models/rxnfp_bert_pretrained_12L"

pytestmark = pytest.mark.slow


class Job(NamedTuple):
    """Hold a run's config, and what one process made of it."""

    config: Path
    shards: Path
    alone: Path  # output
    text: str  # with one [MASK]


@pytest.fixture(scope="module")
def job(
    tmp_path_factory: pytest.TempPathFactory, shards: Path, save_teacher: Callable[..., Path]
) -> Job:
    """Train in one process."""
    folder = tmp_path_factory.mktemp("job")
    train = {"max_steps": STEPS, "precision": "fp32", "num_workers": 1}
    values: dict[str, Any] = {
        "student": {"init": "teacher", "dropout": 0.0, "attention_dropout": 0.0},
        "train": train | {"global_batch_size": 512, "micro_batch_size": 2},
        "checkpoint": {"every": 1, "keep": STEPS},
        "evaluation": {"every": 0, "rows": 64},
        "logging": {"every": 1},
    }
    text = "a b [MASK] d"
    if RECORD is None:
        values |= {"shards": str(shards), "teacher": str(save_teacher(folder / "teacher"))}
    else:
        text = "CC(=O)OCC.[OH-]>>CC(=[MASK])O"
        unpack("rxn-bert.tar.xz", folder)
        corpus = yaml.safe_load((ROOT / "configs/corpus-rxn.yaml").read_text(encoding="utf-8"))
        corpus |= {"output": str(folder / "shards"), "row_length": 64}
        corpus["tokenizer"]["vocab"] = str(folder / corpus["tokenizer"]["vocab"])
        corpus["sources"][0]["path"] = str(folder / corpus["sources"][0]["path"])
        prepare(CorpusConfig.model_validate(corpus))
        shards = folder / "shards"
        values |= {"shards": str(shards), "teacher": str(folder / TEACHER)}
        values |= {"teacher_vocabulary": "same"}
        values["student"] |= {"num_layers": 6, "architecture": "same"}
        values["train"] |= {"global_batch_size": 4096, "micro_batch_size": 16}
    config, alone = write(folder / "run.yaml", {"output": "unused", **values}), folder / "alone"
    threads = {"OMP_NUM_THREADS": str(os.cpu_count()) if RECORD else "1"}
    code, out, err = in_a_process(
        "pretrain", config, f"output={alone}", environment=threads, timeout=LONG
    )
    assert code == 0, out + err
    found = Job(config, shards, alone, text)
    record(found, "one process", alone)
    return found


@pytest.mark.parametrize("how", ["DDP", "ZeRO 1", "ZeRO 2"])
def test_two_nodes_lose_one_in_the_second_step_and_continue(
    job: Job, tmp_path: Path, how: str
) -> None:
    options = ["--timeout", "600", "--max-restarts", "0"]
    if how != "DDP":
        pytest.importorskip("deepspeed")
        options += ["--zero", how[-1]]
    if how == "ZeRO 1" and RECORD is None:
        pytest.skip("for the record only: it differs from ZeRO 2 in what is summed when")
    output = tmp_path / "out"
    with two_nodes() as nodes:
        nodes.launch(job.config, output, *options)
        wait_until(
            lambda: output.exists() and whole_checkpoints(output) == [1],
            lambda: screens(output),
            LONG,
            lambda: nodes.codes == [None, None],
        )
        for pid in nodes.far.pids():  # its launcher, too: the node is gone
            os.kill(pid, signal.SIGKILL)
        codes = nodes.end(LONG, output)
        assert codes[1] == -signal.SIGKILL and codes[0] == 1, screens(output)
        assert whole_checkpoints(output) == [1]
        nodes.launch(job.config, output, *options)
        assert nodes.end(LONG, output) == [0, 0], screens(output)
    assert "continuing after step 1" in screens(output)
    check_end(job, f"two nodes, {how}", output)
    if how == "DDP":
        check_export(job, output, tmp_path)


def test_a_job_of_slurm_loses_a_rank_in_the_second_step_and_continues(
    job: Job, tmp_path: Path, slurm: Callable[..., str]
) -> None:
    def shown() -> str:
        return "".join(path.read_text() for path in tmp_path.glob("distil-*.log"))

    output = tmp_path / "out"
    slurm(
        *("distil", "launch", str(job.config), f"output={output}", "--hardware", "cpu"),
        *("train.precision=fp32", "--gpus", "2", "--timeout", "600", "--slurm"),
        *("train.micro_batch_size=2" if RECORD is None else "train.micro_batch_size=16",),
        *("slurm.partition=here", "slurm.options=[--cpus-per-task=2]", "slurm.time=2:00:00"),
    )
    wait_until(lambda: output.exists() and whole_checkpoints(output) == [1], shown, LONG)
    ranks = (
        process
        for process in psutil.process_iter(["cmdline"])
        if {f"output={output}", "pretrain"} <= set(process.info["cmdline"] or [])
        and process.environ().get("RANK") == "1"
    )
    min(ranks, key=psutil.Process.create_time).kill()  # the others are its loader's
    wait_until(lambda: not slurm("squeue", "-h", "-o", "%T"), shown, LONG)
    assert "restart 1 of 3" in shown() and "continuing after step 1" in shown(), shown()
    check_end(job, "Slurm, one node of two processes", output)


def check_end(job: Job, how: str, output: Path) -> None:
    """Compare losses, step by step, with those of one process."""
    assert [entry["step"] for entry in history(output)] == [0, *range(1, STEPS + 1), STEPS]
    assert STEPS in whole_checkpoints(output)
    for here, there in zip(losses(output), losses(job.alone), strict=True):
        assert here == pytest.approx(there, rel=1e-5)
    ours, others = weights(output), weights(job.alone)
    assert ours.keys() == others.keys()
    for name, weight in ours.items():  # after the last update
        assert np.allclose(weight, others[name], rtol=0, atol=1e-5), name
    record(job, how, output)


def check_export(job: Job, output: Path, folder: Path) -> None:
    """Export the student of two nodes and that of one process; both fill a mask alike."""
    answers = []
    for run in (output, job.alone):
        exported = folder / f"exported-{run.name}"
        code, out, err = in_a_process("export", run, exported, timeout=LONG)
        assert code == 0, out + err
        answers.append(pipeline("fill-mask", str(exported))(job.text))
    here, there = answers
    assert [guess["token_str"] for guess in here] == [guess["token_str"] for guess in there]
    for guess, other in zip(here, there, strict=True):
        assert guess["score"] == pytest.approx(other["score"], abs=1e-4)
    print(f"{job.text}: {here[0]['token_str']} {here[0]['score']:.3f}")


def entries(output: Path) -> list[dict[str, Any]]:
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def losses(output: Path) -> list[float]:
    return [entry["loss"] for entry in entries(output) if "grad_norm" in entry]


def weights(output: Path) -> dict[str, np.ndarray]:
    return load_file(output / f"checkpoints/step-{STEPS:08d}/student/model.safetensors")


def record(job: Job, how: str, output: Path) -> None:
    """Append the figures of a run to the record, if one is asked for."""
    if RECORD is None:
        return
    steps = [entry for entry in entries(output) if "grad_norm" in entry]
    ours, others = weights(output), weights(job.alone)
    both = zip(losses(output), losses(job.alone), strict=True)
    figures = {
        "loss of the third step": steps[-1]["loss"],
        "difference of a loss": max(abs(here / there - 1) for here, there in both),
        "difference of a weight": max(abs(ours[name] - others[name]).max() for name in others),
        "MB of the first process": steps[-1]["memory"] / 1e6,
    }
    append_record(RECORD, job.shards, [row(how, {k: float(v) for k, v in figures.items()})])


def unpack(archive: str, folder: Path) -> None:
    """Unpack an archive of ../shared/data."""
    done = finished("tar", "xJf", ROOT.parent / "shared/data" / archive, "-C", folder)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    os.environ["RECORD"] = str(Path(sys.argv[1]).absolute())
    sys.argv[1:] = ["--record", sys.argv[1]]  # which a record leaves out of its command
    sys.exit(pytest.main([__file__, "-m", "slow", "-p", "no:xdist", "-x", "-s"]))
