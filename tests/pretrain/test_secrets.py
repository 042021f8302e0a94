"""Check that no file, log, card or traceback holds a secret of the environment.

Check also that a run on one machine opens no port to the network.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support import warm
from support.runs import write_yaml
from support.tiny import save_teacher, tiny_distilbert

from pretrain.export.export import export

SECRETS = {
    "HF_TOKEN": "hf_canaryOfTheHubToken0123456789",
    "HUGGING_FACE_HUB_TOKEN": "hf_canaryOfTheOldHubToken01234567",
    "WANDB_API_KEY": "canary0of0weights0and0biases0123456789ab",
    "AWS_SECRET_ACCESS_KEY": "canary/of/the/object/store/0123456789abc",
}
# A run, and two that fail: by what they are given, and by a bug of ours that no one expects.
RUNS = """
import sys
import pretrain.train
from launch.cli import main

def bug(*arguments, **options):
    raise AssertionError("a bug")

for number, config in enumerate(sys.argv[1:]):
    if number == 2:
        pretrain.train.train_step = bug
    sys.argv = ["distil", "pretrain", config, "--debug"]
    try:
        main()
    except SystemExit as stop:
        print("exit code", stop.code, file=sys.stderr)
"""


def leaks(folder: Path) -> list[str]:
    """Return the files below a folder that hold a secret."""
    values = [value.encode() for value in SECRETS.values()]
    return [
        str(path)
        for path in folder.rglob("*")
        if path.is_file() and any(value in path.read_bytes() for value in values)
    ]


def listeners(pid: int) -> set[str]:
    """Return the addresses on which a process or its children wait for connections."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        return {
            connection.laddr.ip
            for member in family
            for connection in member.net_connections(kind="inet")
            if connection.status == psutil.CONN_LISTEN
        }
    except psutil.Error:  # it has ended
        return set()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, run_config: Any) -> Path:
    """Return the files of three runs: to the end and exported, to a loss that is nan, and to a bug.

    `log` is what they printed, `heard` is where they listened.
    """
    folder = tmp_path_factory.mktemp("secrets")
    save_teacher(folder / "teacher")
    poisoned = tiny_distilbert()
    with torch.no_grad():
        poisoned.vocab_transform.bias[0] = float("nan")
    poisoned.save_pretrained(folder / "poisoned")
    shutil.copy(folder / "teacher" / "vocab.txt", folder / "poisoned")
    for name in ("home", "tmp", "heartbeats"):
        (folder / name).mkdir()
    environment = SECRETS | {
        "HF_HOME": str(folder / "home"),
        "TMPDIR": str(folder / "tmp"),
        "DISTIL_HEARTBEATS": str(folder / "heartbeats"),
        "RANK": "0",
        "WANDB_MODE": "offline",
    }

    def config(name: str, **student: object) -> str:
        values = run_config(
            folder / name,
            folder / "teacher",
            student={"num_layers": 2, **student},
            train={"max_steps": 2, "global_batch_size": 4, "micro_batch_size": 4},
            evaluation={"rows": 4},
            logging={"trackers": ["tensorboard", "wandb"]},
        )
        return str(write_yaml(values))

    def start(log: str, *arguments: str) -> warm.Process:
        with (folder / log).open("wb") as file:
            return warm.Process(
                *arguments,
                env=os.environ | environment,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    heard: set[str] = set()
    poisoned_run = config("poisoned-run", init=str(folder / "poisoned"))
    runs = start("log", "-c", RUNS, config("finished"), poisoned_run, config("bug"))
    try:
        while runs.poll() is None:
            heard |= listeners(runs.real)
            time.sleep(0.05)
        (folder / "heard").write_text("\n".join(heard), encoding="utf-8")
        assert runs.returncode == 0, (folder / "log").read_text(encoding="utf-8")
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            export(folder / "finished", folder / "exported", pytest.fail)
    finally:
        runs.kill()
    return folder


def test_the_searched_files_are_not_empty(folder: Path) -> None:
    log = (folder / "log").read_text(encoding="utf-8")
    _, poisoned, bug, _ = log.split("exit code")
    assert poisoned.startswith(" 0\n")
    assert "Traceback" in poisoned and "the loss is nan" in poisoned
    assert bug.startswith(" 3\n") and "Traceback" in bug and "AssertionError: a bug" in bug
    assert log.endswith("exit code 1\n")
    for pattern in (
        *("finished/config.json", "finished/metrics.jsonl", "finished/exit_status.json"),
        *("finished/checkpoints/step-*/state.json", "finished/**/events.out.tfevents.*"),
        *("exported/README.md", "heartbeats/failure-*.json", "heartbeats/rank-*.json"),
    ):
        assert list(folder.glob(pattern)), pattern


def test_no_secret_is_in_any_file(folder: Path) -> None:
    assert leaks(folder) == []


def test_the_search_finds_a_planted_secret(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "log").write_text(f"environment: {SECRETS}", encoding="utf-8")
    assert leaks(tmp_path) == [str(tmp_path / "below" / "log")]


def outside(addresses: Iterable[str]) -> set[str]:
    return {address for address in addresses if address not in ("127.0.0.1", "::1")}


def test_a_run_listens_to_nobody_outside(folder: Path) -> None:
    """Check that TensorBoard's files are written and its server is not started."""
    assert outside((folder / "heard").read_text(encoding="utf-8").split()) == set()


def test_a_listening_socket_is_found() -> None:
    with socket.create_server(("0.0.0.0", 0)):
        assert outside(listeners(os.getpid())) == {"0.0.0.0"}
    with socket.create_server(("127.0.0.1", 0)):
        assert "127.0.0.1" in listeners(os.getpid())
        assert outside(listeners(os.getpid())) == set()
