"""Record the failure of each rank, and find the cause among all of them."""

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
from pretrain.contracts.process import HEARTBEATS, TIMEOUT, ExitCode
from pretrain.device.memory import OUT_OF_MEMORY

# Errors that a rank gets when another rank has ended, hangs or never joined.
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
    f"({TIMEOUT}) gives it longer"
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
    """Hold the failure of one rank."""

    rank: int
    host: str
    pid: int
    time: float  # seconds since 1970
    exit_code: int
    type: str
    message: str  # empty if the rank ended with this exit code and no error
    traceback: str
    log_size: int  # bytes in the rank's log before it reported the failure

    @property
    def waited(self) -> bool:
        """Return True if it waited too long for another rank."""
        return self.exit_code == ExitCode.BUG and timed_out(self.message)

    @property
    def follows(self) -> bool:
        """Return True if another rank's failure is the likely cause, or if there is no message."""
        lost = self.exit_code == ExitCode.BUG and bool(_CONNECTION.search(self.message))
        return lost or self.waited or not self.message

    @property
    def hint(self) -> str:
        """Return advice; "" if there is none."""
        # Not from the traceback, which also quotes errors that were handled.
        return hint(f"{self.type}: {self.message}", follows=self.follows)


def timed_out(text: str) -> bool:
    """Return True if the text is an error of a wait for another rank that took too long."""
    return bool(_TIMEOUT.search(text))


def hint(text: str, *, follows: bool = False) -> str:
    """Return advice after an error with this text; "" if there is none."""
    if follows and timed_out(text):
        return WAITED
    if follows and _CONNECTION.search(text):
        return "the connection to another rank broke: the cause is where that one ended"
    return next((hint for pattern, hint in _HINTS.items() if re.search(pattern, text)), "")


def record(error: BaseException, code: int, text: str) -> None:
    """Write this rank's failure for the supervisor; the first record of a rank stays.

    Do nothing without a supervisor. Call this before the error is printed.
    """
    folder, rank = os.environ.get(HEARTBEATS), os.environ.get("RANK", "")
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
        # A user's mistake needs none, and `masked` could miss parts of a URL in it.
        traceback=""
        if code == ExitCode.MISTAKE
        else masked("".join(traceback.format_exception(error))),
        log_size=os.fstat(1).st_size,
    )
    path = _path(Path(folder), failure.rank)
    # Renamed in one step: the supervisor reads this folder all the time.
    temporary = path.with_suffix(".tmp")
    with suppress(OSError):  # the error itself is what matters
        temporary.write_text(json.dumps(vars(failure)), encoding="utf-8")
        temporary.replace(path)
    if failure.follows:
        # torchrun kills all ranks when the first ends: let the rank with the cause record it first.
        time.sleep(1)


def read_failures(folder: Path) -> dict[int, Failure]:
    """Return the recorded failures by rank."""
    found = [
        Failure(**json.loads(path.read_text(encoding="utf-8")))
        for path in sorted(folder.glob("failure-*.json"))
    ]
    return {failure.rank: failure for failure in found}


def _path(folder: Path, rank: int) -> Path:
    return folder / f"failure-{rank:05d}.json"
