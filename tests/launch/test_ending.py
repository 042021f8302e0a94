"""Check how `distil pretrain` ends: no loader workers after a failure, code 75 after a signal."""

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from support import warm
from support.processes import wait_until

from launch.console import keep_going
from pretrain.monitor.status import read_status

LIMIT = 600  # seconds from the failure to the end
START = 600  # seconds for a process to start on a busy machine
MANY = "train.max_steps=100000"

# Start `distil` with something else to do before each micro-batch.
PATCHED = """
import time, torch, launch.cli, pretrain.distributed.parallel
kind, calls = pretrain.distributed.parallel.DDP, iter(range(99))
forward_backward = kind.forward_backward
def patched(*args, **options):
    {call}
    return forward_backward(*args, **options)
kind.forward_backward = patched
launch.cli.main()
"""
# torch's own error, as it is raised where a step takes too much.
NO_MEMORY = PATCHED.format(call="torch.empty(2**50 if next(calls) == 9 else 1)")
SLOW_STEPS = PATCHED.format(call="time.sleep(0.5)")
# A file takes 24 KiB, as on a full disk.
FULL_DISK = """
import resource, launch.cli
resource.setrlimit(resource.RLIMIT_FSIZE, (24 << 10,) * 2)
launch.cli.main()
"""
LONG_STEP = PATCHED.format(call="time.sleep(600 if next(calls) == 16 else 0)")


class Training:
    """Hold a training process, its output and its loader workers."""

    def __init__(
        self,
        run: Path,
        *arguments: str,
        command: str = "pretrain",
        code: str = "",
        new: bool = False,
        **options: Any,
    ) -> None:
        self.screen, self.output = run.parent / "screen", run.parent / "out"
        program = ["-c", code] if code else ["-m", "launch"]
        argv = [*program, command, str(run), "train.num_workers=1", *arguments]
        self.process: subprocess.Popen[Any]
        with self.screen.open("wb") as file:
            options = {"stdout": file, "stderr": file, **options}
            if new:
                argv = [sys.executable, *argv]
                self.process = subprocess.Popen(argv, start_new_session=True, **options)
                self.pid = self.process.pid
            else:
                self.process = warm.Process(*argv, **options)
                self.pid = self.process.real

    def wait_for(self, done: Callable[[], bool]) -> None:
        """Wait until something is true; assert that the process is alive before."""
        wait_until(done, self.said, alive=lambda: self.process.poll() is None)

    def until(self, text: str) -> None:
        """Wait for something on the screen."""
        self.wait_for(lambda: text in self.said())

    def said(self) -> str:
        return self.screen.read_text()

    def status(self) -> tuple[str, int]:
        """Return how the run ended, and its last step."""
        status = read_status(self.output)
        assert status is not None
        return status["ended"], status["step"]

    def code_after(self, number: signal.Signals) -> int:
        """Send a signal; return the exit code."""
        self.process.send_signal(number)
        return self.code()

    def code(self, limit: float = LIMIT) -> int:
        """Return the exit code; assert that no process is left."""
        code = self.process.wait(limit)
        assert self.left() == []
        return code

    def left(self) -> list[psutil.Process]:
        """Return the processes of its session: itself and its loader workers."""
        found = []
        for process in psutil.process_iter():
            with suppress(ProcessLookupError, psutil.Error):
                ours = os.getsid(process.pid) == self.pid
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def worker(self) -> psutil.Process:
        """Return its loader worker."""
        (found,) = psutil.Process(self.pid).children()
        return found


Start = Callable[..., Training]


@pytest.fixture
def start(run: Path) -> Iterator[Start]:
    """Return a function that starts a training process with one loader worker."""
    started: list[Training] = []

    def begin(*arguments: str, until: str = "", **options: Any) -> Training:
        started.append(Training(run, *arguments, **options))
        started[-1].until(until)
        return started[-1]

    yield begin
    for training in started:
        for process in training.left():
            with suppress(psutil.Error):
                process.kill()
        training.process.wait()


def test_a_full_disk_at_the_last_save_ends_the_process(start: Start) -> None:
    training = start(MANY, "--stop-after", "4", code=FULL_DISK, until="error: ")
    assert training.code() == 2
    assert "step-00000004: File too large" in training.said()


@pytest.mark.slow
def test_out_of_memory_ends_the_process(start: Start) -> None:
    training = start(MANY, code=NO_MEMORY, until="error: ")
    assert training.code() == 2
    assert "out of memory with micro_batch_size 2" in training.said()


@pytest.mark.slow
def test_sigterm_on_a_full_disk_ends_the_process(start: Start) -> None:
    training = start(MANY, code=FULL_DISK, until="step 4/")
    training.process.send_signal(signal.SIGTERM)
    training.until("error: ")
    assert training.code() == 2


@pytest.mark.slow
def test_a_killed_worker_ends_the_process(start: Start) -> None:
    training = start(MANY, until="step 4/")
    training.worker().kill()
    assert training.code() == 1


def test_a_signal_ends_a_step_of_one_process_between_two_micro_batches(start: Start) -> None:
    steps = ["train.global_batch_size=32", "train.max_steps=2"]  # 16 micro-batches a step
    training = start(*steps, code=SLOW_STEPS, until="step 1/")
    time.sleep(1)
    assert training.code_after(signal.SIGTERM) == 75
    assert training.status() == ("interrupted", 1)
    start(*steps).code()
    resumed = load_file(training.output / "checkpoints/step-00000002/student/model.safetensors")
    whole = start(*steps, f"output={training.output.parent / 'whole'}")
    assert whole.code() == 0
    weights = load_file(
        training.output.parent / "whole/checkpoints/step-00000002/student/model.safetensors"
    )
    assert all(torch.equal(resumed[name], tensor) for name, tensor in weights.items())


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_process_in_a_long_step(start: Start) -> None:
    training = start(MANY, code=LONG_STEP, until="step 4/")
    time.sleep(1)
    for _ in range(2):
        training.process.send_signal(signal.SIGINT)
        time.sleep(1)
    assert training.code() == 130


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGTERM, id="term"),
        pytest.param(signal.SIGINT, id="int", marks=pytest.mark.slow),
    ],
)
def test_a_signal_saves_a_run_whose_worker_is_stopped(start: Start, number: signal.Signals) -> None:
    training = start(MANY, until="step 4/")
    training.worker().suspend()
    time.sleep(2)  # the rows that were made ahead are used up
    assert training.code_after(number) == 75
    ended, step = training.status()
    assert ended == "interrupted"
    assert (training.output / f"checkpoints/step-{step:08d}").is_dir()


@pytest.mark.slow
def test_a_run_whose_worker_is_stopped_ends_and_names_it(start: Start) -> None:
    environment = {**os.environ, "DISTIL_TIMEOUT": "5"}
    training = start(MANY, env=environment, until="step 4/")
    worker = training.worker()
    worker.suspend()
    assert training.code() == 2
    said = f"no rows for 5 s (DISTIL_TIMEOUT): loader worker {worker.pid} is stopped"
    assert said in training.said().splitlines()[-1]


@pytest.mark.slow
def test_a_start_beside_a_run_that_has_not_saved_yet_names_that_run(start: Start) -> None:
    first = start(MANY, until="step 2/")
    second = start(MANY, "train.seed=5")
    assert second.code() == 2
    assert "another `distil pretrain` (" in second.said()
    assert "checkpoints are gone" not in second.said()
    assert first.code_after(signal.SIGTERM) == 75


@pytest.mark.skipif(sys.platform != "linux", reason="no /proc")
@pytest.mark.parametrize(
    ("command", "number"),
    [
        pytest.param("pretrain", signal.SIGTERM, id="term-pretrain"),
        pytest.param("launch", signal.SIGINT, id="int-launch"),
        pytest.param("pretrain", signal.SIGINT, id="int-pretrain", marks=pytest.mark.slow),
        pytest.param("launch", signal.SIGTERM, id="term-launch", marks=pytest.mark.slow),
    ],
)
def test_a_signal_while_libraries_are_read_ends_with_75(
    start: Start, command: str, number: signal.Signals
) -> None:
    training = start(MANY, command=command, new=True)
    libraries = Path(f"/proc/{training.pid}/maps")
    training.wait_for(lambda: "libtorch" in libraries.read_text())
    assert training.code_after(number) == 75
    said = "stopped before training had begun; the same command starts it\n"
    assert training.said().endswith(said)
    assert not training.output.exists()


def test_a_signal_while_inputs_are_read_ends_with_75(start: Start) -> None:
    training = start(MANY, new=True)  # a forked one reads them in no time
    training.wait_for(training.output.exists)  # made for the lock
    assert training.code_after(signal.SIGTERM) == 75
    assert not (training.output / "checkpoints").exists()
    assert "stopped before training had begun" in training.said()


@pytest.mark.slow
def test_a_closed_pipe_does_not_end_a_run(start: Start) -> None:
    training = start("train.max_steps=40", stdout=subprocess.PIPE)
    assert training.process.stdout is not None
    training.process.stdout.readline()
    training.process.stdout.close()
    assert training.code(START) == 0
    assert training.status() == ("finished", 40)
    assert training.said() == ""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_log_disk_does_not_end_a_run(start: Start) -> None:
    with open("/dev/full", "w") as full:
        training = start("train.max_steps=40", stdout=full, stderr=full)
    assert training.code(START) == 0
    assert training.status() == ("finished", 40)


def test_a_closed_terminal_saves_the_run(start: Start) -> None:
    ours, theirs = pty.openpty()

    def controlled() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored if these tests run under nohup

    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    training = start(MANY, new=True, preexec_fn=controlled, **streams)
    os.close(theirs)
    seen = b""
    while b"step 3/" not in seen:
        seen += os.read(ours, 65536)
    os.close(ours)  # the kernel sends SIGHUP to the session, the loader's worker included
    assert training.code() == 75
    ended, step = training.status()
    assert ended == "interrupted" and step >= 3
    assert (training.output / f"checkpoints/step-{step:08d}").is_dir()


def test_a_command_may_start_with_closed_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):  # as Python has them after `>&- 2>&-`
        monkeypatch.setattr(sys, name, None)
        monkeypatch.setattr(sys, f"__{name}__", None)
    keep_going()
    for stream in (sys.stdout, sys.stderr):
        with stream:
            assert stream.write("lost") == 4
