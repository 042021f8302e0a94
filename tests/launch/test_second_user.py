"""Check what another user of the machine can reach during a run on one node."""

import os
import subprocess
import sys
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

import psutil
import pytest
from support.processes import wait_until
from torch.distributed import TCPStore  # type: ignore[attr-defined]

NOBODY = 65534
context = get_context("fork")  # as root, so that the libraries need not be readable for others

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="needs two users"),
]


def as_nobody(action, *arguments) -> bool:  # type: ignore[no-untyped-def]
    """Return True if an action succeeds within 20 s in a process of another user."""
    process = context.Process(target=_other_user, args=(action, *arguments))
    process.start()
    process.join(20)
    process.kill()
    process.join()
    return process.exitcode == 0


def _other_user(action, *arguments) -> None:  # type: ignore[no-untyped-def]
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    try:
        action(*arguments)
    except (OSError, RuntimeError):  # torch's own derive from the latter
        os._exit(1)
    os._exit(0)


def _write(port: int) -> None:
    """Write to a torch store at this port, and read it back."""
    store = TCPStore(
        "127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5)
    )
    store.set("planted", "a pickle")
    assert store.get("planted") == b"a pickle"


def _open(path: str) -> None:
    os.close(os.open(path, os.O_RDONLY))


def test_the_check_finds_a_tcp_store() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert as_nobody(_write, store.port)
    assert not as_nobody(_write, 1)


def test_another_user_reaches_no_store_of_a_launch(run: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "launch", "launch", str(run), "--hardware", "cpu"]
    command += ["--gpus", "2", "train.micro_batch_size=2", "train.max_steps=1000000"]
    screen = tmp_path / "screen"
    with screen.open("wb") as file:
        launch = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        said = screen.read_text
        wait_until(lambda: "step 3/" in said(), said, alive=lambda: launch.poll() is None)
        family = [psutil.Process(launch.pid), *psutil.Process(launch.pid).children(recursive=True)]
        ranks = [process.environ() for process in family if "RANK" in process.environ()]
        assert {rank["RANK"] for rank in ranks} == {"0", "1"}
        connections = [c for process in family for c in process.net_connections("inet")]
        ports = {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
        assert len(ports) >= 2  # gloo's, one of each rank
        assert [port for port in ports if as_nobody(_write, port)] == []
        folder = Path(ranks[0]["DISTIL_HEARTBEATS"])
        stores = [path for path in folder.iterdir() if path.name in ("rendezvous", "store")]
        assert len(stores) == 2
        for path in [folder, folder.parent, *stores]:
            assert not as_nobody(_open, str(path)), path
        launch.terminate()
        assert launch.wait(600) == 75
    finally:
        launch.kill()
