"""Runs torchrun until a run has ended: one cause on the screen, restarts, an honest exit code.

torchrun alone returns 1 however its ranks end, shows the tracebacks of all of them at once, waits
for a stopped rank for ever and listens on every network interface.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from getpass import getuser
from itertools import count
from pathlib import Path
from stat import S_IMODE, S_ISDIR, S_ISREG
from tempfile import TemporaryDirectory, gettempdir

from data_prep.disk.locks import is_alive, parsed, this_process
from launch.torchrun.attempt import Ended, attempt, say
from launch.torchrun.watch import Cause
from pretrain.checkpoint.layout import checkpoints
from pretrain.monitor.heartbeat import SUPERVISOR
from pretrain.monitor.status import LAUNCH, read_status

_SAME = 3  # ends at one step that stop a run
_LONGEST = 60  # seconds between restarts
_OWNER = "owner.json"  # in the scratch folder: the process that made it
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
    fewer: Callable[[int], str] = str,
) -> int:
    """Start torchrun, watch its ranks, start it again after a crash; returns the exit code.

    0: done; 2, 3: a rank said so; 75: stopped by a signal, with a new checkpoint or before there
    was anything to save; else 1. Logs are written to OUTPUT/logs/LAUNCH_ID/attempt-N. Nothing that
    it started is left when it returns.

    Args:
        argv: python ENTRY torch.distributed.run OPTIONS ENTRY MODULE ...; if `loopback`, without
            options of the rendezvous.
        output: the folder of the run, where `exit_status.json` is.
        launch_id: names this launch, the same on all its nodes.
        timeout: seconds after which a silent rank is taken for hung; of collectives, too.
        grace: seconds from a signal to the end of all.
        max_restarts: how often torchrun may be started again.
        loopback: keep all connections on this machine, for a run on one node.
        waiting: said at each start of a run on several nodes: for what it waits, and how long.
        fewer: how to go on with the nodes that have come, so many, or 0 if that is not known.
    """
    environment = {
        SUPERVISOR: str(os.getpid()),
        LAUNCH: launch_id,
        "DISTIL_TIMEOUT": f"{timeout:g}",
    }
    steps: list[int] = []
    found = _newest(output)
    _sweep()
    with _noted() as signals, _scratch() as scratch:
        environment |= _temporary_files(scratch)
        for number in count(1):
            host = "" if loopback else socket.gethostname()
            logs = _new_folder(output / "logs" / launch_id, host)
            folder = scratch / str(number)
            folder.mkdir()
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
            if ended.forced and code in (1, 75) and not status:
                say(f"killed before it had saved; the same command goes on after step {newest}")
                if code == 1:
                    say("no checkpoint was written since the start: give --grace longer")
            elif code == 75 and not status:
                say("stopped before training had begun; the same command starts it")
            if code in (0, 75):
                return code
            if ended.forced and not ended.failed:  # torchrun would name the ranks killed here
                say(f"logs: {logs / 'rank-*.log'}")
                return code
            show(ended.cause, code, logs, str(status.get("error", "")))
            if ended.cause.nodes is not None:
                say(fewer(ended.cause.nodes))
            steps.append(ended.cause.step)
            if code != 1 or signals or not may_restart(steps, max_restarts):
                return code
            seconds = min(2 ** (number - 1), _LONGEST)
            say(
                f"restart {number} of {max_restarts} in {seconds} s, after an end at step "
                f"{steps[-1]}: {ended.cause.line}"
            )
            if _signalled(seconds, signals):
                return 75
    raise AssertionError


def _newest(output: Path) -> int:
    """Return the step of the run's newest checkpoint; 0 if there is none."""
    return next(iter(checkpoints(output / "checkpoints")), 0)


def _new_folder(root: Path, host: str) -> Path:
    """attempt-1 (-HOST), or the next that is not there: a launch's name may come again."""
    for number in count(1):
        folder = root / "-".join(filter(None, [f"attempt-{number}", host]))
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise AssertionError


@contextmanager
def _scratch() -> Iterator[Path]:
    """Make a folder for this user alone, with the name of its owner, removed at the end."""
    with TemporaryDirectory(prefix="distil-", ignore_cleanup_errors=True) as name:
        (Path(name) / _OWNER).write_text(json.dumps(asdict(this_process())), encoding="utf-8")
        yield Path(name)


def _sweep() -> None:
    """Remove the scratch folders of this user's supervisors that were killed on this machine.

    Only what is provably one: a folder that nobody else can write to, with the name of a process of
    this boot and pid namespace that has ended. All else that is called distil-* stays.
    """
    here = this_process().machine
    for folder in Path(gettempdir()).glob("distil-*"):
        with suppress(OSError):  # another user's, or gone
            status = folder.lstat()
            if not S_ISDIR(status.st_mode) or S_IMODE(status.st_mode) != 0o700:
                continue
            if status.st_uid != os.geteuid() or not S_ISREG((folder / _OWNER).lstat().st_mode):
                continue  # a pipe would block
            owner = parsed((folder / _OWNER).read_bytes())
            if owner is not None and owner.machine == here and not is_alive(owner):
                shutil.rmtree(folder, ignore_errors=True)


def _temporary_files(scratch: Path) -> dict[str, str]:
    """Return the environment with which what killed ranks leave in TMPDIR goes with `scratch`."""
    if len(os.fsencode(scratch)) + _SOCKET > _LONGEST_SOCKET:
        return {}
    environment = {"TMPDIR": str(scratch)}
    with suppress(KeyError, OSError):  # a user without a name
        # Where torch keeps what it compiled, for the next launch.
        compiled = str(Path(gettempdir()) / f"torchinductor_{getuser()}")
        name = "TORCHINDUCTOR_CACHE_DIR"
        environment[name] = os.environ.get(name, compiled)
    return environment


def exit_code(ended: Ended, said: int | None, *, stopped: bool, saved: bool) -> int:
    """Return what an end means to whoever started the run.

    Args:
        ended: the attempt.
        said: what the ranks have written to `exit_status.json`; None if nothing.
        stopped: a signal came.
        saved: a checkpoint was written since the start. A run that is killed without one would be
            queued again and again, and never get anywhere.
    """
    if said == 75 or ended.code == 0:
        return 75 if said == 75 else 0
    if not ended.failed and said == 0:
        return 0
    if stopped and ended.cause.exit_code == 1 and (ended.forced or not ended.failed):
        return 75 if saved or not ended.forced else 1  # or before there was anything to save
    if ended.cause.exit_code == 1 and said in (2, 3):
        return said  # of another node's rank
    return ended.cause.exit_code


def may_restart(steps: Sequence[int], max_restarts: int) -> bool:
    """Return whether to start again after ends at these steps; says so if not."""
    if max_restarts and len(steps) >= _SAME and len(set(steps[-_SAME:])) == 1:
        say(f"the last {_SAME} attempts all ended at step {steps[-1]}: it would happen again")
        return False
    if max_restarts and len(steps) > max_restarts:
        say(f"ended {len(steps)} times: no restarts are left")
    return len(steps) <= max_restarts


def show(cause: Cause, code: int, logs: Path, error: str) -> None:
    """The cause on the screen; one line if it is the user's to mend.

    Args:
        cause: found on this machine.
        code: the exit code.
        logs: where the ranks' logs lie.
        error: in `exit_status.json`, perhaps of another node's rank.
    """
    if code in (2, 3):
        say(f"error: {cause.line if cause.exit_code == code else error}")
        return
    for text in (cause.details, cause.line, cause.hint and f"hint: {cause.hint}"):
        if text:
            say(text)
    say(f"logs: {logs / 'rank-*.log'}")


@contextmanager
def _noted() -> Iterator[list[float]]:
    """Signals are noted, with their times, in the list given."""
    received: list[float] = []

    def note(number: int, frame: object) -> None:
        received.append(time.monotonic())

    # A supervisor that is stopped sees neither failures nor signals, while its ranks go on.
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


def _signalled(seconds: float, signals: Sequence[float]) -> bool:
    """Wait; True as soon as there is a signal."""
    end = time.monotonic() + seconds
    while not signals and time.monotonic() < end:
        time.sleep(0.1)
    return bool(signals)
