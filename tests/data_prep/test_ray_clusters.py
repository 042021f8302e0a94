"""Prepare a corpus beside and on a Ray cluster that was started by hand, as the manual says."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.processes import finished, in_a_process

from data_prep.shards import load_manifest

pytest.importorskip("ray", reason="Ray is an extra: pip install '.[ray]'")
RAY = str(Path(sys.executable).with_name("ray"))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a new home, and without Ray's variables."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    return tmp_path


@pytest.fixture(params=["before", "after"])
def head(home: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """Start a head as the manual says, before or after a local run has left a token."""
    if not Path(RAY).exists():
        pytest.skip("the command `ray` is not beside this interpreter")
    token = home / "home" / ".ray" / "auth_token"
    if request.param == "after":
        token.parent.mkdir()
        token.write_text("left by a local run", encoding="utf-8")
    temporary = Path("/tmp") / f"distil-ray-{os.getpid()}"  # short: a socket's path has 107 bytes
    command = [RAY, "start", "--head", "--port=0", "--num-cpus=1"]
    command += ["--include-dashboard=false", "--object-store-memory=100000000"]
    command.append(f"--temp-dir={temporary}")
    started = finished(*command)
    assert started.returncode == 0, started.stdout + started.stderr
    os.environ["RAY_TMPDIR"] = str(temporary)  # where a client looks for a cluster of this machine
    (port,) = {*re.findall(r"--address='[\d.]+:(\d+)'", started.stdout)}
    yield f"127.0.0.1:{port}"
    for process in psutil.process_iter(["cmdline"]):  # `ray stop` would end others' clusters, too
        if any(str(temporary) in word for word in process.info["cmdline"] or ()):
            process.kill()
    shutil.rmtree(temporary, ignore_errors=True)


def corpus(folder: Path) -> Path:
    lines = [f"text {i} of a few plain words" for i in range(300)]
    (folder / "texts.txt").write_text("\n".join(lines), encoding="utf-8")
    path = folder / "corpus.yaml"
    values = {
        "output": "shards",
        "tokenizer": {"train": {"vocab_size": 200}},
        "row_length": 32,
        "sources": [{"kind": "text", "path": "texts.txt", "document": "line"}],
        "min_characters": 1,
        "deduplicate": {"documents": "none"},
    }
    path.write_text(json.dumps(values), encoding="utf-8")
    return path


@pytest.mark.slow
def test_a_cluster_is_used_by_its_address_alone(head: str, home: Path) -> None:
    """Join it only by its address, and with the token that it asks for."""
    path = corpus(home)
    digests = []
    token = home / "home" / ".ray" / "auth_token"
    was_there = token.exists()
    for output, environment in (
        ("plain", None),
        ("beside", {}),
        ("together", {"RAY_ADDRESS": head}),
    ):
        engine = [] if environment is None else ["--engine", "ray"]
        ended = in_a_process(
            *("prepare", path, *engine, f"output={output}"), cwd=home, environment=environment
        )
        assert ended[0] == 0, ended[1] + ended[2]
        digests.append(load_manifest(home / output).digest)
        assert token.exists() == was_there  # a token there would slow a cluster without one down
    assert len(set(digests)) == 1


def test_an_address_without_a_cluster_is_named(home: Path) -> None:
    environment = {"RAY_gcs_rpc_server_reconnect_timeout_s": "1"}
    command = ("prepare", corpus(home), "--engine", "ray", "workers=1")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # nothing else can listen at its port
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        environment["RAY_ADDRESS"] = address
        code, out, err = in_a_process(*command, cwd=home, environment=environment)
    line = err.strip().splitlines()[-1]
    assert code == 2 and "Traceback" not in err, out + err
    assert line.startswith(f"error: RAY_ADDRESS {address}: no cluster answers"), line
