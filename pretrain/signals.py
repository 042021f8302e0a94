"""Signals that tell a process to stop: before a run begins, and while its loop runs."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from pretrain.exit_codes import ExitCode

_EARLY = b"stopped before training had begun; the same command starts it\n"


class Interrupted(BaseException):
    """A wait was ended: a signal came, or it took too long."""


class Signals(list[int]):
    """The signals that have come."""

    saves = False  # nothing to save yet: a signal ends the process
    _interrupts = False

    @contextmanager
    def interrupt_after(self, seconds: float) -> Iterator[None]:
        """Raise Interrupted inside the block when a signal comes, or after `seconds` (0: never)."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread may set handlers
            return
        before = signal.signal(signal.SIGALRM, lambda number, frame: self.interrupt())
        try:
            self._interrupts = True
            if self:
                self.interrupt()
            signal.setitimer(signal.ITIMER_REAL, seconds)
            yield
        finally:
            self._interrupts = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def interrupt(self) -> None:
        """Raise Interrupted, once, if such a block is being executed."""
        if self._interrupts:
            self._interrupts = False
            raise Interrupted


@contextmanager
def end_on_signal() -> Iterator[None]:
    """End this process with 75 when a signal comes, while libraries and configs are read.

    Not by an exception, which an import that is under way may swallow.
    """

    def end(number: int, frame: object) -> None:
        _say_early()
        os._exit(ExitCode.REQUEUE)

    with _handled_by(end):
        yield


@contextmanager
def stop_on_signal() -> Iterator[Signals]:
    """Note signals in the list given; the second SIGINT after `saves` is set ends at once.

    Before, each raises SystemExit(75). A rank among several ends without an exception, which would
    wait for a thread that reads.
    """
    received = Signals()

    def note(number: int, frame: object) -> None:
        received.append(number)
        if not received.saves:
            _say_early()
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                os._exit(ExitCode.REQUEUE)
            raise SystemExit(ExitCode.REQUEUE)
        if number == signal.SIGINT:  # a scheduler repeats itself, a person means it
            signal.signal(number, signal.default_int_handler)
        received.interrupt()

    with _handled_by(note):
        yield received


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop a run: without SIGHUP where `nohup` lets it be ignored."""
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


def _say_early() -> None:
    with suppress(OSError):
        os.write(2, _EARLY)
