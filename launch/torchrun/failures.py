"""What the ranks of a run fail of: recorded by each, and the cause found among all."""

from __future__ import annotations

import json
import os
import re
import socket
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from data_prep.disk.credentials import masked
from pretrain.device.memory import OUT_OF_MEMORY
from pretrain.monitor.heartbeat import FOLDER

# What a rank meets when another has ended, hangs or never came.
_CONNECTION = re.compile(
    r"Connection (closed|reset) by peer|Connection refused|Broken pipe|recvValue failed"
    r"|failed to (recv|send)|remote process exited|DistNetworkError|DistStoreError"
    r"|NCCL communicator was aborted|ncclRemoteError|ncclSystemError|Socket (closed|Timeout)",
    re.IGNORECASE,
)
_TIMEOUT = re.compile(
    r"Timed out waiting|Watchdog caught collective operation timeout|Wait timeout"
    r"|ran for \d+ milliseconds before timing out|wait_?timeout|timed out after \d+ ?ms",
    re.IGNORECASE,
)
WAITED = (
    "a collective operation waited for longer than the timeout: a rank hangs or is slow; --timeout "
    "(DISTIL_TIMEOUT) gives it longer"
)
_HINTS = {
    f"(?i:{OUT_OF_MEMORY})": "out of memory: a smaller "
    "train.micro_batch_size, or auto, takes less and trains the same",
    r"FileNotFoundError|No such file or directory": "a file is not there on this host: all "
    "processes must see the same files",
    r"No space left|Disk quota": "free some space; the checkpoints that are there stay",
}


@dataclass(frozen=True)
class Failure:
    """A rank that ended with an error."""

    rank: int
    host: str
    pid: int
    time: float  # seconds since 1970
    exit_code: int
    type: str
    message: str  # empty if it ended with this exit code and no error
    traceback: str
    log_size: int  # bytes in the rank's log before anything was said of the failure

    @property
    def waited(self) -> bool:
        """Return whether it waited in vain for another rank."""
        return self.exit_code == 1 and timed_out(self.message)

    @property
    def follows(self) -> bool:
        """Return whether it is likely another rank's failure seen from here, or says nothing."""
        lost = self.exit_code == 1 and bool(_CONNECTION.search(self.message))
        return lost or self.waited or not self.message

    @property
    def hint(self) -> str:
        """Return what to look at, if that is known."""
        # Not from the traceback, which also quotes errors that were dealt with on the way.
        return hint(f"{self.type}: {self.message}", follows=self.follows)


def timed_out(text: str) -> bool:
    """Return whether an error of this text comes of waiting for another rank for too long."""
    return bool(_TIMEOUT.search(text))


def hint(text: str, *, follows: bool = False) -> str:
    """Return what to look at after an error of this text; "" if nothing is known."""
    if follows and timed_out(text):
        return WAITED
    if follows and _CONNECTION.search(text):
        return "the connection to another rank broke: the cause is where that one ended"
    return next((hint for pattern, hint in _HINTS.items() if re.search(pattern, text)), "")


def record(error: BaseException, code: int, text: str) -> None:
    """Write what this rank fails of, where the supervisor looks; the first record of a rank stays.

    Without a supervisor nothing is written. To be called before the error is printed.
    """
    folder, rank = os.environ.get(FOLDER), os.environ.get("RANK", "")
    if not folder or not rank.isdecimal() or _path(Path(folder), int(rank)).exists():
        return
    failure = Failure(
        rank=int(rank),
        host=socket.gethostname(),
        pid=os.getpid(),
        time=time.time(),
        exit_code=code,
        type=type(error).__name__,
        message=masked(text),
        # A user's mistake needs none, and pieces of a URL in it could not be told from words.
        traceback="" if code == 2 else masked("".join(traceback.format_exception(error))),
        log_size=os.fstat(1).st_size,
    )
    path = _path(Path(folder), failure.rank)
    beside = path.with_suffix(".tmp")
    with suppress(OSError):  # the error itself is what matters
        beside.write_text(json.dumps(vars(failure)), encoding="utf-8")
        beside.replace(path)
    if failure.follows:
        # torchrun ends all ranks when the first has ended: who knows the cause speaks before.
        time.sleep(1)


def read(folder: Path) -> dict[int, Failure]:
    """Return the failures so far, by rank."""
    found = [
        Failure(**json.loads(path.read_text(encoding="utf-8")))
        for path in sorted(folder.glob("failure-*.json"))
    ]
    return {failure.rank: failure for failure in found}


def earliest(failures: dict[int, Failure]) -> Failure | None:
    """Return the first that is no mere consequence of another; else the first."""
    order = sorted(failures.values(), key=lambda f: (f.follows, not f.message, f.time))
    return order[0] if order else None


def _path(folder: Path, rank: int) -> Path:
    return folder / f"failure-{rank:05d}.json"
