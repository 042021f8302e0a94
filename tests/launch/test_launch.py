"""Run `distil launch` with two CPU processes, and run the command that it shows."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from data_prep.shards import load_manifest
from launch.cli import main

ROOT = Path(__file__).parents[2]


def steps(run: Path) -> list[int]:
    lines = (run.parent / "out" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return [record["step"] for record in records if "grad_norm" in record]


def test_a_launch_stops_and_its_shown_command_continues(
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
    plain["OMP_DISPLAY_ENV"] = "verbose"  # libgomp says what it was given, in agent and ranks
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
    spins = [int(n) for n in re.findall(r"GOMP_SPINCOUNT = '(\d+)'", shell.stderr)]
    assert sum(n <= 10_000 for n in spins) == 2, spins


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """Return a folder whose modules write their names to `executed` and fail."""
    folder = tmp_path / "trap"
    folder.mkdir()
    names = ("launch", "pretrain", "data_prep", "yaml", "torch", "socket", "signal", "selectors")
    for name in names:
        path = folder / f"{name}.py"
        if name == "pretrain":
            path = folder / name / "__init__.py"
            path.parent.mkdir()
        path.write_text(
            f"open({str(tmp_path / 'executed')!r}, 'a').write(__name__ + '\\n')\n"
            "raise ImportError('of the working directory')\n"
        )
    return folder


def distil(trap: Path, *arguments: object, **environment: str) -> str:
    """Run the installed command in the trap; returns what it said."""
    done = subprocess.run(
        [str(Path(sys.executable).with_name("distil")), *map(str, arguments)],
        cwd=trap,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
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
    said = distil(
        trap,
        *("launch", run, "--hardware", "cpu", "--gpus", "2", "train.micro_batch_size=2"),
        *("train.num_workers=1", "--stop-after", "1"),
        PYTHONPATH=str(library),
    )
    assert "2 process(es), fp32" in said and steps(run) == [1]
    assert {"0", "1"} <= set((trap.parent / "seen").read_text().split())


@pytest.mark.skipif(sys.version_info < (3, 11), reason="multiprocessing itself does, up to 3.10")
def test_workers_of_prepare_execute_nothing_of_the_working_directory(
    shards: Path, trap: Path, tmp_path: Path
) -> None:
    assert prepared(shards, trap, tmp_path) == shards_digest(shards)


@pytest.mark.slow
def test_ray_workers_execute_nothing_of_the_working_directory(
    shards: Path, trap: Path, tmp_path: Path
) -> None:
    assert prepared(shards, trap, tmp_path, "--engine", "ray") == shards_digest(shards)


def prepared(shards: Path, trap: Path, output: Path, *options: str) -> str:
    """Prepare the fixture's letters once more in the trap; returns the digest."""
    letters = str(shards.parent / "letters.txt")
    values = {
        "output": str(output / "again"),
        "tokenizer": str(shards.parent / "vocab.txt"),
        "row_length": 16,
        "sources": [{"kind": "text", "path": letters, "document": "paragraph"}],
        "validation": 0.1,
        "min_characters": 1,
        "workers": 2,
    }
    (output / "corpus.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    distil(trap, "prepare", output / "corpus.yaml", *options)
    return shards_digest(output / "again")


def shards_digest(folder: Path) -> str:
    return load_manifest(folder).digest


@pytest.mark.slow
def test_a_missing_node_ends_the_wait_and_the_advice_leaves_it_out(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        head = f"127.0.0.1:{free.getsockname()[1]}"
    asked = ["launch", str(run), "--hardware", "cpu", "--gpus", "1", "train.micro_batch_size=2"]
    asked += ["--nodes", "2", "--node-rank", "0", "--head", head]
    done = subprocess.run(
        [sys.executable, "-m", "launch", *asked, "--timeout", "5", "--max-restarts", "0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 1
    assert f"waiting for all 2 nodes at {head}, at most 35 s" in done.stderr
    assert "1 of 2 nodes came\n" in done.stderr
    assert "Traceback" not in done.stderr
    (offer,) = [line for line in done.stderr.splitlines() if "distil launch" in line]
    command = shlex.split(offer[offer.index("distil launch") :])
    monkeypatch.setattr(sys, "argv", [*command, "--dry-run"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert "1 node(s) x 1 process(es) on cpu" in capsys.readouterr().out
