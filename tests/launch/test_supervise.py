"""Run torchrun, ranks and signals: check processes left, output and exit codes."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest
from support import warm
from support.processes import ROOT, python, wait_until
from support.ranks import FORKS

from launch.torchrun.attempt import Ended, Tail
from launch.torchrun.command import ENTRY
from launch.torchrun.rank import log_file
from launch.torchrun.supervise import exit_code, may_restart, supervise
from launch.torchrun.watch import Beat, Cause, Watch
from pretrain.monitor.status import read_status, write_status

LIMIT = 60  # seconds that the supervisor is given
HANG = 600  # seconds after which a test gives up
ENDLESS = (ENTRY, "support.worker", "1000000")
SIGNALS = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
UNDER_WAY = "rank 0 is under way"
CANARY = "canary-b1946ac92492d234"


def under_supervision(output: Path, ranks: int, command: list[str], options: Any) -> None:
    """Run a supervisor in this process; its screen is a file."""
    screen = os.open(output.parent / "screen", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(screen, 1)
    os.dup2(screen, 2)
    os.environ["WORKER_OUTPUT"] = str(output)
    if program := options.pop("python", None):  # of ranks, for torchrun
        os.environ["PYTHON_EXEC"] = program
    if temporary := options.pop("temporary", None):
        os.environ["TMPDIR"] = tempfile.tempdir = temporary
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(Path(__file__).parents[1])])
    os.environ["AWS_SECRET_ACCESS_KEY"] = CANARY
    argv = [sys.executable, ENTRY, "torch.distributed.run", f"--nproc-per-node={ranks}", SIGNALS]
    values = {"timeout": LIMIT, "grace": LIMIT, "max_restarts": 0, **options}
    sys.exit(supervise([*argv, *command], output=output, launch_id="it", loopback=True, **values))


class Supervised:
    """Hold a supervisor with its ranks."""

    def __init__(self, output: Path, ranks: int, *command: str, **options: Any) -> None:
        output.mkdir(exist_ok=True)
        self.output = output
        (output.parent / "screen").write_text("")
        arguments = (output, ranks, list(command), options)
        self.process = FORKS.Process(target=under_supervision, args=arguments)
        self.process.start()
        self.pid: Any = self.process.pid

    @property
    def screen(self) -> str:
        return (self.output.parent / "screen").read_text()

    def log(self, rank: int, attempt: int = 1) -> str:
        return (self.output / f"logs/it/attempt-{attempt}/rank-{rank:05d}.log").read_text()

    def started(self) -> list[psutil.Process]:
        """Return all processes that the supervisor has started, found by their environment."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("DISTIL_LOGS", "").startswith(f"{self.output}/"):
                    found.append(process)
        return found

    def rank(self, number: int) -> psutil.Process:
        """Return a rank's process."""
        (found,) = (p for p in self.started() if p.environ().get("RANK") == str(number))
        return found

    def name(self, number: int) -> str:
        """Return a pattern for what a rank is called on the screen."""
        return re.escape(f"rank {number} ({socket.gethostname()}, pid {self.rank(number).pid})")

    def until(self, text: str) -> None:
        """Wait for something on the screen."""
        wait_until(lambda: text in self.screen, lambda: self.screen, alive=self.process.is_alive)

    def code_after(self, number: signal.Signals) -> int:
        """Send the supervisor a signal; return its exit code."""
        os.kill(self.pid, number)
        return self.code()

    def code(self) -> int:
        """Return the exit code; assert that no process is left."""
        self.process.join(HANG)
        assert self.process.exitcode is not None, f"still there:\n{self.screen}"
        assert self.started() == []
        return self.process.exitcode

    def stop(self) -> None:
        """End what a failing test leaves."""
        self.process.kill()
        for process in self.started():
            with suppress(psutil.Error):
                process.kill()


Start = Callable[..., Supervised]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a number of ranks of a module under a supervisor."""
    with ExitStack() as stack:

        def begin(ranks: int, *command: str, until: str = "", **options: Any) -> Supervised:
            run = Supervised(tmp_path / "out", ranks, *(command or ENDLESS), **options)
            stack.callback(run.stop)
            run.until(until)
            return run

        yield begin


def pretrain(run: Path) -> tuple[str, ...]:
    return (ENTRY, "launch", "pretrain", str(run))


def listening(processes: list[psutil.Process]) -> list[str]:
    """Return the addresses at which processes listen."""
    connections = [c for process in processes for c in process.net_connections("inet")]
    return [str(c.laddr.ip) for c in connections if c.status == psutil.CONN_LISTEN]


def test_a_run_stays_on_loopback_and_saves_when_told_to_stop(start: Start) -> None:
    run = start(2, until=UNDER_WAY)
    heard = listening([psutil.Process(run.pid), *run.started()])
    assert len(heard) == 2  # gloo's socket of each rank
    assert set(heard) == {"127.0.0.1"}
    assert run.code_after(signal.SIGTERM) == 75
    status = read_status(run.output)
    assert status is not None
    assert (status["launch"], status["ended"]) == ("it", "interrupted")
    assert re.fullmatch(r"rank 0 is under way\ninterrupted: at most 60 s .+\n", run.screen)
    assert [run.log(rank) for rank in range(2)] == [f"rank {r} is under way\n" for r in range(2)]


def test_a_socket_on_all_interfaces_would_be_noticed() -> None:
    with socket.create_server(("", 0)):
        assert "0.0.0.0" in listening([psutil.Process()])


@pytest.mark.slow
def test_ctrl_z_does_nothing_and_ctrl_c_saves(start: Start) -> None:
    run = start(2, until=UNDER_WAY)
    os.kill(run.pid, signal.SIGTSTP)
    time.sleep(1)
    assert psutil.Process(run.pid).status() != psutil.STATUS_STOPPED
    assert read_status(run.output) is None
    assert run.code_after(signal.SIGINT) == 75


@pytest.mark.slow
def test_a_scheduler_may_signal_every_process_of_a_job(start: Start) -> None:
    run = start(2, until=UNDER_WAY)
    for process in [psutil.Process(run.pid), *run.started()]:
        process.send_signal(signal.SIGUSR1)
    assert run.code() == 75
    assert "Traceback" not in run.screen


def test_a_signal_before_the_first_step_ends_with_75(start: Start) -> None:
    run = start(1)
    wait_until(run.started, lambda: run.screen, alive=run.process.is_alive)
    assert run.code_after(signal.SIGTERM) == 75


@pytest.mark.parametrize(
    ("before", "after", "code"),
    [
        pytest.param(None, 2, 75, id="new checkpoint"),
        pytest.param(2, 4, 75, id="newer checkpoint", marks=pytest.mark.slow),
        pytest.param(2, None, 1, id="old checkpoint"),
        pytest.param(None, None, 1, id="no checkpoint", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_do_not_end_in_time_are_killed(
    start: Start, tmp_path: Path, before: int | None, after: int | None, code: int
) -> None:
    def save(step: int | None) -> None:
        if step is not None:
            (tmp_path / f"out/checkpoints/step-{step:08d}").mkdir(parents=True)

    save(before)
    run = start(1, *ENDLESS, "hang", "0", "3", grace=1, until="about to hang")
    save(after)
    assert run.code_after(signal.SIGTERM) == code
    assert f"goes on after step {after or before or 0}" in run.screen
    assert ("no checkpoint was written since the start" in run.screen) == (code == 1)


@pytest.mark.slow
def test_a_second_signal_kills_at_once(start: Start, tmp_path: Path) -> None:
    run = start(1, *ENDLESS, "hang", "0", "3", grace=10 * LIMIT, until="about to hang")
    (tmp_path / "out/checkpoints/step-00000002").mkdir(parents=True)
    os.kill(run.pid, signal.SIGTERM)
    run.until("interrupted")
    time.sleep(1.2)
    assert run.process.is_alive()
    assert run.code_after(signal.SIGTERM) == 75


def test_a_killed_rank_ends_all_and_is_named(start: Start, tmp_path: Path) -> None:
    run = start(2, until=UNDER_WAY)
    name = run.name(1)
    run.rank(1).kill()
    assert run.code() == 1
    line = rf"^{name} ended without a word at step \d+ \(\w+\): killed by SIGKILL, perhaps out of"
    assert re.search(line, run.screen, re.M)
    status = read_status(tmp_path / "out")  # for `distil report`
    assert status is not None and (status["ended"], status["exit_code"]) == ("failed", 1)
    assert re.search(line, status["error"])
    assert "Traceback" not in run.screen  # the others' lost connections
    assert "Connection" in run.log(0)


@pytest.mark.slow
def test_a_stopped_rank_ends_all_and_is_named(start: Start, tmp_path: Path) -> None:
    run = start(3, until=UNDER_WAY, timeout=30)
    name = run.name(1)
    run.rank(1).suspend()
    assert run.code() == 1
    line = rf"^{name} has been silent for \d+ s, last seen at step \d+ \(\w+\)$"
    status = read_status(tmp_path / "out")  # not what a rank saw that waited for it
    assert status is not None and re.search(line, status["error"], re.M), status
    assert re.search(line, run.screen, re.M)
    assert "Traceback" not in run.screen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "fault", "timeout", "waits", "log"),
    [
        (2, "hang", 30, r", and rank 0 waited for it in vain at step 20 \(counts\)", "Timed out"),
        (1, "hang", 15, r" for \d+ s", ""),
        (2, "hang-nccl", LIMIT, ", and rank 0 .+", ""),  # whose watchdog aborts it
    ],
    ids=["blocks a collective", "waits for data", "has another aborted"],
)
def test_a_rank_that_hangs_is_named_with_its_stack(
    start: Start, ranks: int, fault: str, timeout: int, waits: str, log: str
) -> None:
    run = start(ranks, *ENDLESS, fault, str(ranks - 1), "20", timeout=timeout)
    assert run.code() == 1
    has = "" if ranks > 1 else "has "
    line = rf"^rank {ranks - 1} \(.+\) {has}stood at step 20 \(data\){waits}$"
    assert re.search(line, run.screen, re.M), run.screen
    assert re.search(r"File .*worker.py.* in hang$", run.screen, re.M)
    assert log in run.log(0)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "stopped"), [(1, 0), (2, 0), (2, 1)])
def test_a_stopped_loader_worker_ends_the_run_and_is_named(
    start: Start, run: Path, ranks: int, stopped: int
) -> None:
    command = (*pretrain(run), "train.max_steps=100000", "train.num_workers=1")
    supervised = start(ranks, *command, timeout=30, until="step 3/")
    processes = [p for p in supervised.started() if "RANK" in p.environ()]
    parents = [p.pid for p in processes]
    workers = {p.environ()["RANK"]: p for p in processes if p.ppid() in parents}
    assert len(workers) == ranks
    workers[str(stopped)].suspend()
    assert supervised.code() == 1
    pid = workers[str(stopped)].pid
    assert f"its loader worker, pid {pid}, is stopped" in supervised.screen
    assert re.search(rf"rank {stopped} \(.*\) (has )?stood at step \d+ \(data\)", supervised.screen)


@pytest.mark.slow
def test_a_long_evaluation_is_not_taken_for_a_hang(start: Start) -> None:
    run = start(1, ENTRY, "support.worker", "30", "evaluate", "0", "20", timeout=10)
    assert run.code() == 0


@pytest.mark.slow
def test_logs_that_are_removed_do_not_end_a_run(start: Start) -> None:
    run = start(2, until=UNDER_WAY)
    shutil.rmtree(run.output / "logs")
    time.sleep(2)
    assert run.process.is_alive(), run.screen
    assert run.code_after(signal.SIGTERM) == 75


@pytest.mark.skipif(sys.platform != "linux", reason="no /proc/self/mem")
def test_an_unreadable_log_is_not_shown_further(tmp_path: Path) -> None:
    log_file(tmp_path, 0).symlink_to("/proc/self/mem")  # opened; reading it fails
    watch = Watch(tmp_path, tmp_path, shown=0)
    Tail(watch).show()
    assert watch.last_words(Beat(0, 1, "host", 1, "data", "", 1, False)) == ""


def test_a_crash_is_shown_once_and_the_next_attempt_finishes(start: Start) -> None:
    command = (ENTRY, "support.worker", "40", "crash-once", "1", "20")
    run = start(2, *command, max_restarts=2, python=warm.python())
    assert run.code() == 0
    screen = run.screen
    assert screen.count("Traceback") == 1
    assert 'raise LookupError("row 17 has gone astray")' in screen
    assert re.search(
        r"^rank 1 \(.+\) failed at step 20 \(data\): LookupError: row 17 has", screen, re.M
    )
    assert re.search(r"^restart 1 of 2 in 1 s, after an end at step 20: rank 1", screen, re.M)
    assert "restart 2" not in screen and "Connection" not in screen
    # What was there to be shown; gloo has several ways to say it.
    assert "Traceback" in run.log(0)
    assert "LookupError" in run.log(1)
    assert run.log(1, attempt=2) == "rank 1 is under way\n"
    for path in run.output.rglob("*"):
        assert path.is_dir() or CANARY not in path.read_text(), path


@pytest.mark.slow
def test_three_failures_at_one_step_stop_the_run(start: Start) -> None:
    run = start(1, ENTRY, "support.worker", "40", "crash", "0", "5", max_restarts=10)
    assert run.code() == 1
    assert "the last 3 attempts all ended at step 5: it would happen again" in run.screen
    logs = sorted(path.name for path in (run.output / "logs/it").iterdir())
    assert logs == ["attempt-1", "attempt-2", "attempt-3"]


@pytest.mark.slow
def test_a_launch_leaves_nothing_among_temporary_files(start: Start) -> None:
    # A short name, because sockets have their names there.
    with TemporaryDirectory(prefix="t") as folder:
        run = start(2, ENTRY, "support.worker", "40", "litter", "0", "5", temporary=folder)
        assert run.code() == 0
        assert "litter in distil-" in run.screen
        assert os.listdir(folder) == []


def test_no_process_outlives_the_supervisor(start: Start) -> None:
    run = start(2, until=UNDER_WAY)
    assert len(run.started()) == 3  # torchrun and its ranks
    os.kill(run.pid, signal.SIGKILL)
    wait_until(lambda: not run.started(), run.started, HANG)


def test_a_diverged_run_is_one_line_despite_an_older_status_file(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    write_status(tmp_path / "out", ended="interrupted", step=1, num_steps=2, exit_code=75)
    run = start(2, *ENDLESS, "diverge", "1", "3", max_restarts=5, python=warm.python())
    assert run.code() == 3
    assert run.screen == "error: step 3: the loss is nan\n"


def test_a_mistake_of_all_ranks_is_one_line(start: Start, tmp_path: Path, run: Path) -> None:
    missing = tmp_path / "missing"
    supervised = start(2, *pretrain(run), f"shards={missing}", max_restarts=5)
    assert supervised.code() == 2
    config, error = supervised.screen.splitlines()
    assert config.startswith("config: ")
    assert error.startswith("error: ") and str(missing) in error


@pytest.mark.slow
def test_a_signal_saves_a_real_run_and_the_same_command_continues(start: Start, run: Path) -> None:
    command = (*pretrain(run), "train.max_steps=100000")
    first = start(2, *command, until="step 3/100000")
    assert first.code_after(signal.SIGTERM) == 75
    status = read_status(first.output)
    assert status is not None
    assert (status["ended"], status["exit_code"]) == ("interrupted", 75)
    assert status["step"] >= 3
    second = start(2, *command, "--stop-after", str(status["step"] + 2))
    assert second.code() == 0
    assert f"continuing after step {status['step']:,}" in second.screen
    assert f"stopped at step {status['step'] + 2:,}" in second.screen


Code = int | None  # None: it was killed, or said nothing


@pytest.mark.parametrize(
    ("code", "failed", "forced", "said", "stopped", "saved", "expected"),
    [
        (0, False, False, None, False, True, 0),
        (1, False, False, 75, False, True, 75),  # a signal that only the ranks received
        (1, True, False, 75, True, True, 75),  # what came after the checkpoint is no matter
        (1, False, False, 0, False, True, 0),  # crashed while it ended
        (1, True, False, 0, False, True, 1),
        (1, False, False, None, True, False, 75),  # nothing to save yet
        (None, False, True, None, True, False, 1),  # it would be queued again without end
        (None, False, True, None, True, True, 75),
        (None, True, True, None, True, True, 75),
        (None, False, True, 75, True, True, 75),
        (1, True, False, None, True, True, 1),
        (1, True, False, 3, False, True, 3),  # another node's rank
        (1, True, False, 1, False, True, 1),
    ],
)
def test_exit_codes(
    code: Code, failed: bool, forced: bool, said: Code, stopped: bool, saved: bool, expected: int
) -> None:
    ended = Ended(code=code, failed=failed, forced=forced, cause=Cause("", 0))
    assert exit_code(ended, said, stopped=stopped, saved=saved) == expected


def test_restarts_are_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    assert may_restart([4], 2) and may_restart([4, 4], 2)
    assert not may_restart([4, 4, 5], 2)
    assert may_restart([4, 4, 5], 3)
    assert not may_restart([3, 4, 4, 4], 10)
    assert not may_restart([4], 0)
    assert capsys.readouterr().err.count("\n") == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_log_on_a_full_disk_does_not_end_a_rank(tmp_path: Path) -> None:
    (tmp_path / "rank-00000.log").symlink_to("/dev/full")
    environment = dict.fromkeys(("DISTIL_LOGS", "DISTIL_HEARTBEATS"), str(tmp_path))
    environment |= {"RANK": "0", "LOCAL_RANK": "0", "PYTHONPATH": str(ROOT)}
    # A module that prints; without the wrapper it fails.
    done = python(ENTRY, "launch.torchrun.rank", "this", environment=environment)
    assert done.returncode == 0, done.stderr
    with open("/dev/full", "w") as full:
        plain = subprocess.run([sys.executable, "-m", "this"], stdout=full, timeout=HANG)
    assert plain.returncode != 0
