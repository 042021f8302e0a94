"""A `distil pretrain` that fails is gone, with its loader workers, whatever it failed of."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
LIMIT = 60  # seconds from the failure to the end
START = 240  # seconds for a process to start on a busy machine
MANY = "train.max_steps=100000"

# torch's own error, as it is raised where a step takes too much.
NO_MEMORY = """
import torch, launch.cli, pretrain.parallel
kind, calls = pretrain.parallel.Replicated, iter(range(99))
forward_backward = kind.forward_backward
def greedy(*args, **options):
    torch.empty(2**50 if next(calls) == 9 else 1)
    return forward_backward(*args, **options)
kind.forward_backward = greedy
launch.cli.main()
"""


class Training:
    """A real process, what it has printed, and its loader workers."""

    def __init__(
        self, run: Path, *arguments: str, code: str = "", file_size: int | None = None
    ) -> None:
        self.screen = run.parent / "screen"
        python = [sys.executable, *(["-c", code] if code else ["-m", "launch"])]
        command = [*python, "pretrain", str(run), "train.num_workers=1", *arguments]
        if file_size is not None:
            command = ["bash", "-c", f'ulimit -f {file_size}; exec "$@"', "-", *command]
        with self.screen.open("wb") as file:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True
            )

    def until(self, text: str) -> None:
        """Wait for something on the screen."""
        end = time.monotonic() + START
        while text not in self.screen.read_text():
            assert time.monotonic() < end and self.process.poll() is None, self.screen.read_text()
            time.sleep(0.05)

    def code(self) -> int:
        """The exit code, after which nothing may be left."""
        code = self.process.wait(LIMIT)
        assert self.left() == []
        return code

    def left(self) -> list[psutil.Process]:
        """The processes of its session: itself and its loader workers."""
        found = []
        for process in psutil.process_iter():
            with suppress(ProcessLookupError, psutil.Error):
                ours = os.getsid(process.pid) == self.process.pid
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def worker(self) -> psutil.Process:
        """Its loader worker."""
        (found,) = psutil.Process(self.process.pid).children()
        return found


@pytest.fixture
def start(run: Path) -> Iterator[Callable[..., Training]]:
    """A function that starts a training process with one loader worker."""
    started: list[Training] = []

    def begin(*arguments: str, **options: object) -> Training:
        started.append(Training(run, *arguments, **options))  # type: ignore[arg-type]
        return started[-1]

    yield begin
    for training in started:
        for process in training.left():
            with suppress(psutil.Error):
                process.kill()
        training.process.wait()


def test_a_full_disk_at_the_last_save_ends_the_process(start: Callable[..., Training]) -> None:
    training = start(MANY, "--stop-after", "4", file_size=24)
    training.until("error: ")
    assert training.code() == 2
    assert "step-00000004: File too large" in training.screen.read_text()


@pytest.mark.slow
def test_want_of_memory_ends_the_process(start: Callable[..., Training]) -> None:
    training = start(MANY, code=NO_MEMORY)
    training.until("error: ")
    assert training.code() == 2
    assert "out of memory with micro_batch_size 2" in training.screen.read_text()


@pytest.mark.slow
def test_sigterm_on_a_full_disk_ends_the_process(start: Callable[..., Training]) -> None:
    training = start(MANY, file_size=24)
    training.until("step 4/")
    training.process.send_signal(signal.SIGTERM)
    training.until("error: ")
    assert training.code() == 2


@pytest.mark.slow
def test_a_killed_worker_ends_the_process(start: Callable[..., Training]) -> None:
    training = start(MANY)
    training.until("step 4/")
    training.worker().kill()
    assert training.code() == 1


@pytest.mark.slow
def test_a_second_ctrl_c_ends_the_process_beside_a_stopped_worker(
    start: Callable[..., Training],
) -> None:
    training = start(MANY)
    training.until("step 4/")
    training.worker().suspend()
    time.sleep(2)  # the rows that were made ahead are used up
    for _ in range(2):
        training.process.send_signal(signal.SIGINT)
        time.sleep(1)
    assert training.code() == 130
