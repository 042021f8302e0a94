"""Run `distil launch` with two CPU processes, and run the command that it shows."""

import json
import os
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import warm
from support.processes import ROOT, finished, in_a_process

from data_prep.shards import load_manifest

Distil = Callable[..., Any]


def steps(run: Path) -> list[int]:
    lines = (run.parent / "out" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return [record["step"] for record in records if "grad_norm" in record]


def test_a_launch_stops_and_its_shown_command_continues(distil: Distil, run: Path) -> None:
    asked = ["launch", str(run), "--hardware", "cpu", "--gpus", "2", "train.micro_batch_size=2"]
    code, out, err = in_a_process(*asked, "--stop-after", "2")
    assert code == 0, out + err
    assert "2 rows x 2 micro-batches x 2 process(es), fp32" in out
    assert steps(run) == [1, 2]

    dry = distil(*asked, "--dry-run")
    assert dry.code == 0 and steps(run) == [1, 2]
    (line,) = [line for line in dry.out.splitlines() if line[0] != "#"]
    line = line.replace(warm.python(), sys.executable)
    shown = out.replace(warm.python(), sys.executable)
    assert line in shown.replace(" --stop-after 2", "")
    plain = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "PYTHONPATH": str(ROOT)}
    plain["OMP_DISPLAY_ENV"] = "verbose"  # libgomp says what it was given, in agent and ranks
    shell = finished("bash", "-c", line, cwd=run.parent, env=plain)
    assert shell.returncode == 0, shell.stdout + shell.stderr
    assert steps(run) == [1, 2, 3, 4]
    spins = [int(n) for n in re.findall(r"GOMP_SPINCOUNT = '(\d+)'", shell.stderr)]
    assert sum(n <= 10_000 for n in spins) == 2, spins


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """Return a folder whose modules write their names to `executed` and fail."""
    folder = tmp_path / "trap"
    folder.mkdir()
    names = ("launch", "pretrain", "data_prep", "yaml", "torch", "socket", "signal", "selectors")
    for name in names:
        path = folder / (f"{name}/__init__.py" if name == "pretrain" else f"{name}.py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            f"open({str(tmp_path / 'executed')!r}, 'a').write(__name__ + '\\n')\n"
            "raise ImportError('of the working directory')\n"
        )
    return folder


def in_trap(trap: Path, *arguments: object, **environment: str) -> str:
    """Run the installed command in the trap; return its output."""
    command = Path(sys.executable).with_name("distil")
    if not command.exists():
        pytest.skip(f"{command} is not installed")
    done = finished(command, *arguments, cwd=trap, environment=environment)
    executed = trap.parent / "executed"
    assert not executed.exists(), executed.read_text()
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_launch_executes_nothing_of_its_working_directory(run: Path, trap: Path) -> None:
    """Check torchrun, the ranks and their loader workers; PYTHONPATH must still work."""
    library = trap.parent / "library"
    library.mkdir()
    (library / "sitecustomize.py").write_text(
        "import os\n"
        f"open({str(trap.parent / 'seen')!r}, 'a').write(os.environ.get('RANK', '-') + ' ')\n"
    )
    said = in_trap(
        trap,
        *("launch", run, "--hardware", "cpu", "--gpus", "2", "train.micro_batch_size=2"),
        *("train.num_workers=1", "--stop-after", "1"),
        PYTHONPATH=str(library),
    )
    assert "2 process(es), fp32" in said and steps(run) == [1]
    assert {"0", "1"} <= set((trap.parent / "seen").read_text().split())


OLD = pytest.mark.skipif(sys.version_info < (3, 11), reason="multiprocessing itself does")


@pytest.mark.parametrize(
    "engine",
    [pytest.param("processes", marks=OLD), pytest.param("ray", marks=pytest.mark.slow)],
)
def test_workers_of_prepare_execute_nothing_of_the_working_directory(
    shards: Path, trap: Path, tmp_path: Path, engine: str
) -> None:
    again, config = tmp_path / "again", shards.parent / "letters.yaml"
    in_trap(trap, "prepare", config, f"output={again}", "workers=2", "--engine", engine)
    assert load_manifest(again).digest == load_manifest(shards).digest


@pytest.mark.slow
def test_a_missing_node_ends_the_wait_with_advice(run: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        head = f"127.0.0.1:{free.getsockname()[1]}"
    asked = ["launch", str(run), "--hardware", "cpu", "--gpus", "1", "train.micro_batch_size=2"]
    asked += ["--nodes", "2", "--node-rank", "0", "--head", head]
    code, _, err = in_a_process(*asked, "--timeout", "5", "--max-restarts", "0")
    assert code == 1
    assert f"waiting for all 2 nodes at {head}, at most 35 s" in err
    assert "1 of 2 nodes came\n" in err
    assert "Traceback" not in err
    assert "start with fewer --nodes" in err
