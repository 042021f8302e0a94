"""Check what a rank records of itself, and when it ends itself."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from pretrain.monitor.status import Heartbeat, path, read_status, write_status

ROOT = Path(__file__).parents[2]
LIMIT = 60  # seconds

BEATING = """
import os, sys, time
from pretrain.monitor.status import Heartbeat
heartbeat = Heartbeat.from_environment(3)
assert Heartbeat.from_environment(3) is heartbeat
heartbeat.at(7, "forward")
heartbeat.saving("save:rename")
print(os.getpid(), flush=True)
time.sleep(600)
"""
# A parent that is gone as soon as its child beats.
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
print(child.stdout.readline(), flush=True)
"""


def told(folder: Path) -> dict[str, object]:
    values: dict[str, object] = json.loads(path(folder, 3).read_text())
    return values


def beating(folder: Path, *command: str, **environment: str) -> tuple["subprocess.Popen[str]", int]:
    """Return a process, and the number of the process that beats, once it does."""
    values = {**os.environ, "PYTHONPATH": str(ROOT), "DISTIL_HEARTBEATS": str(folder)}
    process = subprocess.Popen(
        [sys.executable, "-c", *command],
        env=values | environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_a_killed_rank_has_recorded_its_position(tmp_path: Path) -> None:
    process, pid = beating(tmp_path, BEATING)
    assert pid == process.pid
    process.kill()
    process.wait()
    values = told(tmp_path)
    assert (values["rank"], values["pid"]) == (3, process.pid)
    assert (values["step"], values["phase"]) == (7, "forward")
    assert (values["background"], values["closed"]) == ("save:rename", False)


def test_a_stopped_rank_stops_counting(tmp_path: Path) -> None:
    process, _ = beating(tmp_path, BEATING)

    def changes(seconds: float) -> bool:
        before = told(tmp_path)["beat"]
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if told(tmp_path)["beat"] != before:
                return True
            time.sleep(0.1)
        return False

    assert changes(LIMIT)
    process.send_signal(signal.SIGSTOP)
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    assert not changes(2)
    process.send_signal(signal.SIGCONT)
    assert changes(LIMIT)
    process.kill()
    process.wait()


def test_a_rank_ends_when_its_parent_is_gone(tmp_path: Path) -> None:
    parent, pid = beating(tmp_path, PARENT, BEATING)
    child = psutil.Process(pid)
    assert parent.wait(LIMIT) == 0
    assert psutil.wait_procs([child], timeout=LIMIT)[1] == []


def test_a_rank_ends_when_its_supervisor_is_gone(tmp_path: Path) -> None:
    supervisor = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    process, _ = beating(tmp_path, BEATING, DISTIL_SUPERVISOR=str(supervisor.pid))
    supervisor.kill()  # and not waited for: a zombie supervises nobody
    assert process.wait(LIMIT) == -signal.SIGKILL
    supervisor.wait()


def test_a_closed_heartbeat_records_its_end(tmp_path: Path) -> None:
    heartbeat = Heartbeat(3, tmp_path)
    heartbeat.at(9, "end")
    heartbeat.close()
    heartbeat.at(10, "forward")
    heartbeat.saving("save:rename")
    values = told(tmp_path)
    assert (values["step"], values["phase"], values["closed"]) == (9, "end", True)


def test_nothing_is_written_without_a_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DISTIL_HEARTBEATS", raising=False)
    monkeypatch.chdir(tmp_path)
    with closing(Heartbeat.from_environment(0)) as heartbeat:
        heartbeat.at(4, "forward")
        assert (heartbeat.step, heartbeat.phase) == (4, "forward")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "{", "[75]", '{"exit_code": "75"}', '{"step": 1}'])
def test_an_unreadable_status_is_none(tmp_path: Path, text: str) -> None:
    assert read_status(tmp_path) is None
    write_status(tmp_path, ended="finished", step=4, num_steps=4, exit_code=0)
    status = read_status(tmp_path)
    assert status is not None and status["exit_code"] == 0
    (tmp_path / "exit_status.json").write_text(text)
    assert read_status(tmp_path) is None
