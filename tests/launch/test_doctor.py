"""Check what `distil doctor` finds, with real processes and real inputs that are wrong."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import warm
from support.processes import in_a_process, unused_port, wait_until

from launch import checks
from launch.torchrun import sums
from launch.torchrun.command import Head

Distil = Callable[..., Any]


# Real processes. Checks of the machine are those of test_inputs_of_a_run, too, and the ranks are
# those of test_a_node_that_does_not_answer.
@pytest.mark.slow
def test_this_machine_is_well_and_two_processes_sum() -> None:
    code, out, err = in_a_process("doctor", "--distributed", "--gpus", 2)
    assert code == 0, out + err
    assert re.search(r"(?m)^ok +torch: 2\.", out) and out.endswith("all is well\n")
    free = shutil.disk_usage(".").free / 1e9
    (shown,) = re.findall(r"disk: ([\d.]+) GB free", out)
    assert float(shown) == pytest.approx(free, rel=0.05)
    (speed,) = re.findall(r"ok    sums: .* over 2 process\(es\) .*: ([\d.]+) GB/s", out)
    assert float(speed) > 0


def test_a_version_outside_of_what_setup_allows_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    real = checks.metadata.version
    others = {"torch": "1.13.1"}
    monkeypatch.setattr(checks.metadata, "version", lambda name: others.get(name) or real(name))
    found = {one.what: one for one in checks.versions()}
    if "distil" in found:
        pytest.skip("this project is not installed as a package")
    assert found["torch"].grade == "fail" and "pip install 'torch" in found["torch"].text
    assert found["accelerate"].grade == "ok"


def test_inputs_of_a_run_are_loaded_as_it_would(distil: Distil, run: Path) -> None:
    assert distil("doctor", run, "train.num_workers=0").code == 0
    assert not (run.parent / "out").exists()
    code, _, err = distil("doctor", "shipped:glue.yaml")
    assert code == 2 and "is a recipe: distil recipe" in err
    code, out, _ = distil("doctor", run, "shards=/nowhere")
    assert code == 2 and "fail  run: /nowhere" in out and out.endswith("1 check(s) failed\n")


def test_a_run_that_was_interrupted_is_well(distil: Distil, run: Path) -> None:
    """Begin it in bf16, which `auto` keeps for it on a machine that would choose fp32."""
    more = ("train.num_workers=0", "train.max_steps=4")
    assert distil("pretrain", run, *more, "train.precision=bf16", "--stop-after", 2).code == 0
    for precision in ("auto", "bf16"):
        code, out, err = distil("doctor", run, *more, f"train.precision={precision}")
        assert code == 0 and "ok    run: shards" in out, out + err
    code, out, _ = distil("doctor", run, *more, "train.precision=fp32")
    assert code == 2 and "precision was bf16" in out
    (output,) = (path.parent for path in run.parent.glob("*/config.json"))
    assert "run: shards" in distil("doctor", output).out


def test_a_disk_that_is_too_small_fails(run: Path) -> None:
    from launch.config import load_config
    from pretrain.config import RunConfig

    found = {one.what: one for one in checks.places(load_config(RunConfig, run), 10**18)}
    assert found["disk"].grade == "fail" and "lower checkpoint.keep" in found["disk"].text


def test_a_node_that_does_not_answer_is_named() -> None:
    head = f"127.0.0.1:{unused_port()}"
    options = ("doctor", "--distributed", "--nodes", 3, "--gpus", 1, "--head", head)
    command = ("-m", "launch", *options, "--timeout", "20", "--node-rank", "1")
    other = warm.Process(*command, stdout=subprocess.PIPE, text=True)
    begun = time.monotonic()
    code, out, err = in_a_process(*options, "--node-rank", 0, "--timeout", "10")
    assert code == 2 and "fail  nodes: --node-rank 2 (of 0 to 2): no answer within 10 s" in out, (
        out + err
    )
    out, _ = other.communicate(timeout=600)
    assert other.returncode == 2 and "fail  nodes" in out
    assert time.monotonic() - begun < 600


def test_without_a_first_node_the_others_say_so() -> None:
    options = ("doctor", "--distributed", "--nodes", 3, "--gpus", 1, "--timeout", 3)
    head = f"127.0.0.1:{unused_port()}"
    code, out, err = in_a_process(*options, "--head", head, "--node-rank", 2)
    assert code == 2 and "the first node does not answer" in out, out + err


def test_options_of_sums_need_them(distil: Distil, run: Path) -> None:
    code, _, err = distil("doctor", "--nodes", 2)
    assert code == 2 and "are for --distributed" in err
    code, out, err = distil("doctor", "--distributed", "--nodes", 2)
    assert code == 2 and not out and "needs --head HOST" in err
    code, out, _ = distil("doctor", run, "train.precision=fp16", "train.num_workers=0")
    assert code == 2 and "fail  train.precision: train.precision fp16 needs" in out
    assert "ok    run: shards" in out  # what a login node can say of a run for GPUs


@pytest.mark.slow
def test_nodes_that_do_not_fit_each_other_say_why() -> None:
    for gpus, rank, message in ((1, 1, "says 2 x 2 processes, this one's 2 x 1"), (2, 0, "port")):
        head = Head("127.0.0.1", unused_port())
        options = ("doctor", "--distributed", "--nodes", 2, "--timeout", 120)
        options += ("--head", f"{head.host}:{head.port}")
        command = ("-m", "launch", *options, "--gpus", 2, "--node-rank", 0)
        first = warm.Process(*command, stdout=subprocess.PIPE, text=True)
        meets = (head.host, head.port_apart(sums._APART))
        wait_until(partial(answers, meets), first.poll)
        more = ("--gpus", gpus, "--node-rank", rank)
        code, out, err = in_a_process(*options, *more, new=True)
        first_out, _ = first.communicate(timeout=600)
        assert code == 2 and first.returncode == 2
        assert message in out + first_out, out + err + first_out
        assert "Traceback" not in err


def answers(address: tuple[str, int]) -> bool:
    """Return whether a program listens there."""
    with socket.socket() as one:
        return one.connect_ex(address) == 0
