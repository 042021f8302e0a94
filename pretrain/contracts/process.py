"""Define what processes of this program share: exit codes, variables and the signals that stop.

`docs/distributed.md` describes them. Users set only the variable TIMEOUT. The launch sets GRACE,
and the supervisor the others.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from typing import Any

_EARLY = "stopped before training had begun; the same command starts it"


class Interrupted(BaseException):
    """Signal that a wait has ended: a signal arrived, or the wait took too long."""


class Signals(list[int]):
    """List the signals that have arrived."""

    saves = False  # while there is nothing to save, a signal ends the process
    _interrupts = False

    @contextmanager
    def interrupt_after(self, seconds: float) -> Iterator[None]:
        """Raise Interrupted inside the block on a signal, or after `seconds` (0: never)."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread may set handlers
            return
        # An exception from the handler ends a wait inside a library.
        before = signal.signal(signal.SIGALRM, lambda number, frame: self.interrupt())
        try:
            self._interrupts = True
            # A signal may have come just before the block.
            if self:
                self.interrupt()
            signal.setitimer(signal.ITIMER_REAL, seconds)
            yield
        finally:
            self._interrupts = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def interrupt(self) -> None:
        """Raise Interrupted once, if a block of `interrupt_after` is being executed."""
        if self._interrupts:
            self._interrupts = False
            raise Interrupted


@contextmanager
def end_on_signal(text: str = _EARLY) -> Iterator[None]:
    """End this process with 75 when a signal arrives, for instance while configs are read.

    It raises no exception, because an import in progress may swallow one.
    """

    def end(number: int, frame: object) -> None:
        _say(text)
        os._exit(ExitCode.REQUEUE)

    with _handled_by(end):
        yield


@contextmanager
def stop_on_signal() -> Iterator[Signals]:
    """Add signals to the yielded list; the second SIGINT after `saves` is set ends at once.

    Before `saves` is set each signal raises SystemExit(75). One of several ranks ends without an
    exception, which would wait for a thread that reads.
    """
    received = Signals()

    def note(number: int, frame: object) -> None:
        received.append(number)
        if not received.saves:
            _say(_EARLY)
            # The thread of `patiently`, which may wait for a slow disk.
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                os._exit(ExitCode.REQUEUE)
            raise SystemExit(ExitCode.REQUEUE)
        if number == signal.SIGINT:  # schedulers repeat other signals; a user repeats this one
            signal.signal(number, signal.default_int_handler)
        received.interrupt()

    with _handled_by(note):
        yield received


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop a run: without SIGHUP where `nohup` ignores it."""
    # Slurm sends SIGTERM or SIGUSR1, a user's Ctrl-C SIGINT, a closed terminal SIGHUP.
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP]
    return numbers[:3] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else numbers


@contextmanager
def _handled_by(handler: Callable[[int, object], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    before: dict[int, Any] = {n: signal.signal(n, handler) for n in stop_signals()}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def _say(text: str) -> None:
    with suppress(OSError):
        os.write(2, text.encode() + b"\n")


TIMEOUT = "DISTIL_TIMEOUT"  # seconds that a rank waits for the others
GRACE = "DISTIL_GRACE"  # seconds to save in after a signal
LAUNCH = "DISTIL_LAUNCH"  # name of the launch, the same on all nodes
HEARTBEATS = "DISTIL_HEARTBEATS"  # folder in which ranks report; unset without a supervisor
SUPERVISOR = "DISTIL_SUPERVISOR"  # pid of the supervisor
HEAD = "DISTIL_HEAD"  # first host of a job of Slurm, from its script
ENDS_WITH_STDIN = "DISTIL_ENDS_WITH_STDIN"  # set by a sweep, whose runs end with it
LOGS = "DISTIL_LOGS"  # folder of this attempt's logs
STORE = "DISTIL_STORE"  # file in which the ranks of a single node meet


class ExitCode(IntEnum):
    """Say how a process ended."""

    DONE = 0
    BUG = 1
    MISTAKE = 2  # the user or the environment: one line names the culprit and the fix
    NOT_FINITE = 3  # a loss or a gradient that is not finite, or ranks that differ
    REQUEUE = 75  # stopped by a signal; the same command continues (EX_TEMPFAIL, as Slurm reads it)
    INTERRUPTED = 130  # a second Ctrl-C: no checkpoint
