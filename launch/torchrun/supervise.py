"""Run torchrun until a run has ended; show one cause of a failure, restart, return an exit code.

torchrun itself returns 1 however its ranks end, shows the tracebacks of all ranks at once, waits
forever for a stopped rank and listens on every network interface.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

from launch.torchrun.attempt import Ended, attempt, say
from launch.torchrun.watch import Cause
from pretrain.checkpoint.layout import checkpoints
from pretrain.contracts.process import LAUNCH, SUPERVISOR, TIMEOUT, ExitCode
from pretrain.monitor.status import read_status, write_status

_SAME = 3  # failures at one step after which a restart is useless
_LONGEST = 60  # seconds between restarts
_SOCKET = len("/torch-shm-dir-123456/manager.sock")  # the longest that a rank makes in TMPDIR
_LONGEST_SOCKET = 103  # bytes of a socket's path on macOS; 107 on Linux
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def supervise(
    argv: Sequence[str],
    *,
    output: Path,
    launch_id: str,
    timeout: float,
    grace: float,
    max_restarts: int,
    loopback: bool,
    waiting: str = "",
) -> int:
    """Start torchrun, watch its ranks, restart it after a crash; return the exit code.

    The code is 0 when the run is done; 2 or 3 if a rank returned that; 75 if a signal stopped the
    run, with a new checkpoint or before there was anything to save; else 1. Logs are written to
    OUTPUT/logs/LAUNCH_ID/attempt-N. All processes it started have ended when it returns.

    Args:
        argv: python ENTRY torch.distributed.run OPTIONS ENTRY MODULE ...; if `loopback`, without
            options of the rendezvous.
        output: the folder of the run, where `exit_status.json` is.
        launch_id: name of this launch, the same on all its nodes.
        timeout: seconds after which a silent rank counts as hung; also the limit of collectives.
        grace: seconds from a signal until all processes are killed.
        max_restarts: how often torchrun may be started again.
        loopback: keep all connections on this machine, for a run on one node.
        waiting: line to show at each start of a run on several nodes.
    """
    environment = {SUPERVISOR: str(os.getpid()), LAUNCH: launch_id, TIMEOUT: f"{timeout:g}"}
    steps: list[int] = []
    found = _newest(output)  # to know later whether this launch has saved anything
    with _record_signals() as signals, _scratch() as (scratch, temporary):
        environment |= temporary
        for number in count(1):
            host = "" if loopback else socket.gethostname()
            logs = _new_folder(output / "logs" / launch_id, host)
            folder = scratch / str(number)
            folder.mkdir()
            # An exit status that is unchanged, or of another launch, says nothing about this
            # attempt.
            before = read_status(output)
            if waiting:
                say(waiting)
            ended = attempt(
                argv,
                folder=folder,
                logs=logs.resolve(),
                environment=environment,
                timeout=timeout,
                grace=grace,
                loopback=loopback,
                signals=signals,
            )
            status = read_status(output) or {}
            if status == before or status.get("launch") != launch_id:
                status = {}
            newest = _newest(output)
            saved = newest != found
            code = exit_code(ended, status.get("exit_code"), stopped=bool(signals), saved=saved)
            if ended.forced and code in (ExitCode.BUG, ExitCode.REQUEUE) and not status:
                say(f"killed before it had saved; the same command goes on after step {newest}")
                if code == ExitCode.BUG:
                    say("no checkpoint was written since the start: give --grace longer")
            elif code == ExitCode.REQUEUE and not status:
                say("stopped before training had begun; the same command starts it")
            if code in (ExitCode.DONE, ExitCode.REQUEUE):
                return code
            if ended.forced and not ended.failed:  # torchrun would name the ranks killed here
                say(f"logs: {logs / 'rank-*.log'}")
                return code
            show(ended.cause, code, logs, str(status.get("error", "")))
            steps.append(ended.cause.step)
            if code != ExitCode.BUG or signals or not may_restart(steps, max_restarts):
                # A rank records how it ended itself, not the first failure.
                if not status or code == ExitCode.BUG:
                    with suppress(OSError):
                        write_status(
                            output,
                            ended="failed",
                            step=int(status.get("step", ended.cause.step)),
                            num_steps=int(status.get("num_steps", 0)),  # 0: not known
                            exit_code=code,
                            error=ended.cause.line,
                        )
                return code
            # 1, 2, 4 ... 60 s: a node or a disk may need a moment to come back.
            seconds = min(2 ** (number - 1), _LONGEST)
            say(
                f"restart {number} of {max_restarts} in {seconds} s, after an end at step "
                f"{steps[-1]}: {ended.cause.line}"
            )
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                time.sleep(0.1)
                if signals:
                    return ExitCode.REQUEUE
    raise AssertionError


def _newest(output: Path) -> int:
    """Return the step of the run's newest checkpoint; 0 if there is none."""
    return next(iter(checkpoints(output / "checkpoints")), 0)


def _new_folder(root: Path, host: str) -> Path:
    """Make attempt-1 (-HOST), or the next number: a launch's name may be used again."""
    for number in count(1):
        folder = root / "-".join(filter(None, [f"attempt-{number}", host]))
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise AssertionError


@contextmanager
def _scratch() -> Iterator[tuple[Path, dict[str, str]]]:
    """Make a temporary folder for only this user; yield it and the environment that uses it.

    As TMPDIR it also collects the files that killed ranks leave, and takes them with it.
    """
    with TemporaryDirectory(prefix="distil-", ignore_cleanup_errors=True) as name:
        scratch, environment = Path(name), {}
        if len(os.fsencode(scratch)) + _SOCKET <= _LONGEST_SOCKET:
            environment["TMPDIR"] = name
        yield scratch, environment


def exit_code(ended: Ended, said: int | None, *, stopped: bool, saved: bool) -> int:
    """Return the exit code of the launch after an attempt.

    Args:
        ended: the attempt.
        said: the exit code in `exit_status.json`, written by the ranks; None without one.
        stopped: a signal was received.
        saved: a checkpoint was written since the start. A run that is killed without one would be
            queued again and again without progress.
    """
    if said == ExitCode.REQUEUE:
        return ExitCode.REQUEUE
    if ended.code == 0 or (not ended.failed and said == ExitCode.DONE):
        return ExitCode.DONE
    unexplained = ended.cause.exit_code == ExitCode.BUG
    if stopped and unexplained and (ended.forced or not ended.failed):
        # Not forced: the signal came before there was anything to save.
        return ExitCode.REQUEUE if saved or not ended.forced else ExitCode.BUG
    if unexplained and said in (ExitCode.MISTAKE, ExitCode.NOT_FINITE):
        return said  # from a rank on another node
    return ended.cause.exit_code


def may_restart(steps: Sequence[int], max_restarts: int) -> bool:
    """Return whether to restart after failures at these steps; print the reason if not."""
    # The run is deterministic, so a crash that it causes itself comes back at the same step.
    if max_restarts and len(steps) >= _SAME and len(set(steps[-_SAME:])) == 1:
        say(f"the last {_SAME} attempts all ended at step {steps[-1]}: it would happen again")
        return False
    if max_restarts and len(steps) > max_restarts:
        say(f"ended {len(steps)} times: no restarts are left")
    return len(steps) <= max_restarts


def show(cause: Cause, code: int, logs: Path, error: str) -> None:
    """Print the cause; a single line if the user can fix it (codes 2 and 3).

    Args:
        cause: the cause found on this machine.
        code: the exit code.
        logs: the folder of the ranks' logs.
        error: the message in `exit_status.json`, perhaps from a rank on another node.
    """
    if code in (ExitCode.MISTAKE, ExitCode.NOT_FINITE):
        say(f"error: {cause.line if cause.exit_code == code else error}")
        return
    for text in (cause.details, cause.line, cause.hint and f"hint: {cause.hint}"):
        if text:
            say(text)
    say(f"logs: {logs / 'rank-*.log'}")


@contextmanager
def _record_signals() -> Iterator[list[float]]:
    """Yield a list to which the time of each stop signal is appended."""
    received: list[float] = []

    def note(number: int, frame: object) -> None:
        received.append(time.monotonic())

    # A supervisor that Ctrl-Z stops sees neither failures nor signals, while its ranks go on.
    before = {signal.SIGTSTP: signal.signal(signal.SIGTSTP, signal.SIG_IGN)}
    before |= {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        for number in _SIGNALS:
            if number != signal.SIGHUP or before[number] != signal.SIG_IGN:  # nohup
                signal.signal(number, note)
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
