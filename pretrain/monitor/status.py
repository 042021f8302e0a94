"""Tell a supervisor how a rank is doing, and how the run ended.

A rank that hangs cannot report it, so a thread writes its position and a counter twice a second.
The counter of a stopped process stands still. A rank that waits for others keeps counting at one
position.

A launcher cannot see the exit codes of ranks: torchrun returns 1 for all of them. So
`exit_status.json` says how a run ended. It names the launch that wrote it (environment
DISTIL_LAUNCH), so that an old file is recognised.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import psutil

from data_prep.disk.credentials import masked
from data_prep.disk.json_files import parse_object, read_regular
from data_prep.disk.replacing import replace_json
from data_prep.shards import CorpusError
from pretrain import NumericalError, RunError
from pretrain.contracts.process import HEARTBEATS, LAUNCH, SUPERVISOR, ExitCode
from pretrain.device.memory import out_of_memory

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


STATUS = "exit_status.json"
_FULL = "; free some space, then run the same command again; what is finished stays"
_TAKEN = "; a file is where a folder should be, or the other way round; choose another path"
_REMEDIES = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EROFS: "; the disk is read-only; set `output:` to a place that can be written",
    errno.EACCES: "; change its permissions, or use a path that this user may read and write",
    errno.ENOTDIR: _TAKEN,
    errno.EEXIST: _TAKEN,
    errno.EFBIG: "; a file-size limit was reached; raise it (ulimit -f) or write elsewhere",
}


def verdict(error: BaseException) -> tuple[int, str]:
    """Return the exit code and the message of a process that ends with `error`."""
    name = type(error).__name__
    # `jointly` ends the ranks on which nothing went wrong this way.
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(bool(error.code))
        return code, "another process of this run failed; its log says why"
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED, f"{name}: interrupted at once, without a checkpoint"
    if isinstance(error, NumericalError):
        return ExitCode.NOT_FINITE, str(error)
    # Errors that a user can fix: one line and exit code 2, without a traceback.
    if isinstance(error, RunError | CorpusError):
        return ExitCode.MISTAKE, str(error)
    if out_of_memory(error):
        said = str(error).partition("\n")[0] or name
        return (
            ExitCode.MISTAKE,
            f"out of memory ({said}): end other programs, or use a machine with more",
        )
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        remedy = _REMEDIES.get(error.errno or 0, "")
        return ExitCode.MISTAKE, f"{where}{error.strerror or error or name}{remedy}"
    return ExitCode.BUG, f"{name}: {error}".removesuffix(": ")


def write_status(
    output: Path, *, ended: str, step: int, num_steps: int, exit_code: int, error: str = ""
) -> None:
    """Replace the file; only one rank calls it.

    Raises:
        OSError: it cannot be written.
    """
    values = {
        "launch": os.environ.get(LAUNCH, ""),
        "ended": ended,
        "step": step,
        "num_steps": num_steps,
        "exit_code": exit_code,
        # Messages may quote a URL with its password.
        "error": masked(error),
        "time": time.time(),
    }
    replace_json(output / STATUS, values)


def read_status(output: Path) -> dict[str, Any] | None:
    """Return the content of the file; None if it is missing or unreadable."""
    try:
        values = parse_object(read_regular(output / STATUS))
    except (OSError, ValueError):
        return None
    return values if type(values.get("exit_code")) is int else None
