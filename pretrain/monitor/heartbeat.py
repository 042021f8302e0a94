"""Write a sign of life of each rank, for its supervisor.

A rank that hangs cannot report it, so a thread writes its position and a counter twice a second.
The counter of a stopped process stands still. A rank that waits for others keeps counting at one
position.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import psutil

from pretrain.contracts.process import HEARTBEATS, SUPERVISOR

EVERY = 0.5  # seconds
_RECORD = 1024  # bytes: written at once and in place, so that a reader sees one record


class Heartbeat:
    """Record the position of a rank; it is written only if there is a folder."""

    _running: ClassVar[Heartbeat | None] = None

    def __init__(self, rank: int, folder: Path | None) -> None:
        self.rank = rank
        self.step = 0
        self.phase = "start"
        self.background = ""
        self._folder = folder
        self._file = -1
        if folder is None:
            return
        self._host = socket.gethostname()
        self._beat = 0
        self._mutex = threading.Lock()
        self._stop = threading.Event()
        # Kept open, so that a beat needs one system call and no new file.
        self._file = os.open(path(folder, rank), os.O_WRONLY | os.O_CREAT, 0o600)
        self._write()
        self._thread = threading.Thread(target=self._keep, name="heartbeat", daemon=True)
        self._thread.start()

    @classmethod
    def from_environment(cls, rank: int) -> Heartbeat:
        """Return this process's heartbeat, the running one if there is one."""
        name = os.environ.get(HEARTBEATS)
        folder = Path(name) if name else None
        running = cls._running
        if running is not None and (running.rank, running._folder) == (rank, folder):
            return running
        beginning = cls(rank, folder)
        cls._running = beginning if folder else None
        return beginning

    def at(self, step: int, phase: str) -> None:
        """Record the position; write it at once, because a killed rank cannot write it later."""
        self.step = step
        self.phase = phase
        self._write()

    def saving(self, part: str) -> None:
        """Record the phase of the thread that writes checkpoints."""
        self.background = part
        self._write()

    def close(self) -> None:
        """Stop the thread, and record that the end was intended."""
        if self._file < 0:
            return
        self._stop.set()
        self._thread.join()
        self._write()
        with self._mutex:
            os.close(self._file)
            self._file = -1
        if Heartbeat._running is self:
            Heartbeat._running = None

    def _keep(self) -> None:
        # torchrun, or its agent. Another parent later means that it has ended.
        parent = os.getppid()
        supervisor: psutil.Process | None = None
        with suppress(ValueError, psutil.NoSuchProcess):
            supervisor = psutil.Process(int(os.environ.get(SUPERVISOR, "")))
        while not self._stop.wait(EVERY):
            alive = False
            if supervisor is not None:
                with suppress(psutil.NoSuchProcess):
                    # `is_running` is false for another process that got the same pid.
                    running = supervisor.is_running()
                    alive = running and supervisor.status() != psutil.STATUS_ZOMBIE
            # Without parent or supervisor nothing ends this process if it hangs, and it might
            # write into a run that has been started again.
            if os.getppid() != parent or (SUPERVISOR in os.environ and not alive):
                # Not an exception: the main thread may hang in a collective operation.
                os.kill(os.getpid(), signal.SIGKILL)
            self._write()

    def _write(self) -> None:
        if self._folder is None:
            return
        with self._mutex:
            if self._file < 0:  # closed
                return
            self._beat += 1
            values = {
                "rank": self.rank,
                "pid": os.getpid(),
                "host": self._host,
                "step": self.step,
                "phase": self.phase,
                "background": self.background,
                "beat": self._beat,
                "closed": self._stop.is_set(),
            }
            with suppress(OSError):  # a lost beat must not end the run
                os.pwrite(self._file, json.dumps(values).encode().ljust(_RECORD), 0)


def path(folder: Path, rank: int) -> Path:
    """Return the file of a rank's heartbeat."""
    return folder / f"rank-{rank:05d}.json"
