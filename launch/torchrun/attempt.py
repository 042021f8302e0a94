"""Start torchrun once, watch its ranks, pass signals on, and end every process it started."""

from __future__ import annotations

import codecs
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import psutil

from data_prep.messages import complain
from launch.torchrun import failures
from launch.torchrun.command import ENTRY, LOOPBACK
from launch.torchrun.rank import STACK, log_file
from launch.torchrun.watch import Beat, Cause, Watch, cause
from pretrain.contracts.process import HEARTBEATS, LOGS, STORE

_POLL = 0.1  # seconds
_PATIENCE = 5.0  # seconds from the first failure to the end of all
_START = 300.0  # seconds: while libraries are read from a cold disk, no heartbeat comes


@dataclass(frozen=True)
class Ended:
    """Describe how an attempt ended."""

    code: int | None  # torchrun's own; None if it was killed
    failed: bool  # a rank has recorded an error
    forced: bool  # killed after a signal
    cause: Cause


def attempt(
    argv: Sequence[str],
    *,
    folder: Path,
    logs: Path,
    environment: Mapping[str, str],
    timeout: float,
    grace: float,
    loopback: bool,
    signals: Sequence[float],
) -> Ended:
    """Run torchrun until it and every process it started have ended.

    Args:
        argv: python ENTRY torch.distributed.run OPTIONS ENTRY MODULE ...
        folder: an empty folder for heartbeats.
        logs: a folder for logs.
        environment: variables of torchrun and the ranks, in addition to this process's own.
        timeout: seconds of silence after which a rank counts as hung.
        grace: seconds from a signal until all processes are killed.
        loopback: rendezvous through files, and communicate on the loopback interface.
        signals: times of received signals (monotonic clock); it may grow meanwhile.
    """
    options, here = _rendezvous(folder) if loopback else ([], {})
    options += ["--log-dir", str(folder)]  # else a new folder of TMPDIR, which stays
    at = argv.index(ENTRY, 3)
    command = [*argv[:3], *options, *argv[3:at], ENTRY, "launch.torchrun.rank", *argv[at + 1 :]]
    name = "torchrun.log" if loopback else f"torchrun-{socket.gethostname()}.log"
    with (logs / name).open("wb") as chatter:
        torchrun = subprocess.Popen(
            command,
            env={**os.environ, **environment, **here, HEARTBEATS: str(folder), LOGS: str(logs)},
            stdin=subprocess.DEVNULL,
            stdout=chatter,
            stderr=chatter,
            start_new_session=True,
        )
    watch = Watch(folder, logs)
    tail = Tail(watch)
    try:
        forced = _until_over(torchrun, watch, tail, timeout, grace, signals)
        hung = watch.silent(0.7 * timeout)  # a rank that only started slowly is not to blame
        for process in _started(folder):
            if process.pid != torchrun.pid:
                with suppress(psutil.Error):
                    process.kill()
        with suppress(subprocess.TimeoutExpired):
            torchrun.wait(3)  # for what it has to say
        code = torchrun.poll()
    finally:
        torchrun.kill()
        torchrun.wait()
        deadline = time.monotonic() + 10  # a process inside a system call ends when that returns
        while (left := _started(folder)) and time.monotonic() < deadline:
            for process in left:
                with suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(left, timeout=1)
    watch.failed = failures.read_failures(folder)
    tail.show()
    text = ""
    with suppress(OSError):  # the folder was removed
        text = (logs / name).read_text(encoding="utf-8", errors="replace")
    return Ended(code, bool(watch.failed), forced, cause(watch, hung, text, code))


def _rendezvous(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return options and environment for a rendezvous in files, with gloo on loopback.

    A TCP store would let any user of the machine write to it, and torchrun unpickles what it finds
    there. Only this user can read and write `folder`.
    """
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    environment = {name: os.environ.get(name, LOOPBACK) for name in names}
    environment[STORE] = str(folder / "store")
    # By default torchrun's agent opens a store for the ranks, on all interfaces.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    options = ["--rdzv-backend=c10d", "--rdzv-conf=store_type=file", "--local-addr=127.0.0.1"]
    return [*options, f"--rdzv-endpoint={folder / 'rendezvous'}"], environment


def _until_over(
    torchrun: subprocess.Popen[bytes],
    watch: Watch,
    tail: Tail,
    timeout: float,
    grace: float,
    signals: Sequence[float],
) -> bool:
    """Watch until torchrun has ended or must be killed; return True if a signal is the reason."""
    told = failing = None  # times
    while torchrun.poll() is None:
        time.sleep(_POLL)
        watch.look()
        tail.show()
        now = time.monotonic()
        if signals and told is None:
            told = now
            # The ranks save and end, and torchrun ends after them. Slurm has signalled torchrun as
            # well; a third signal would make it leave its ranks behind.
            for beat in watch.beats.values():
                with suppress(ProcessLookupError):
                    os.kill(beat.pid, signal.SIGTERM)
            if not watch.beats:
                torchrun.terminate()
            say(f"interrupted: at most {grace:g} s to save and end; a second signal kills")
        # One signal may arrive twice: from the scheduler's step and from its script.
        if told is not None and (now - told > grace or signals[-1] - signals[0] > 1):
            return True
        suspects: list[Beat] = []
        if failing is None and (watch.failed or watch.lost):
            # Before torchrun stops the other ranks, which then leave the place where they waited.
            failing, suspects = now, watch.awaited
            watch.left = suspects
        # Wait longer than the collective's timeout: its error names the missing rank.
        elif failing is None and (stuck := watch.standing(timeout + _PATIENCE)):
            failing, suspects = now, stuck
            watch.stuck = suspects
        for beat in suspects:
            # Note its stopped loader workers before all processes are killed, and ask for a stack.
            with suppress(psutil.Error, ProcessLookupError):
                children = psutil.Process(beat.pid).children()
                pids = [str(c.pid) for c in children if c.status() == psutil.STATUS_STOPPED]
                if pids:
                    workers = f"its loader worker, pid {', '.join(pids)}, is stopped"
                    watch.stopped[beat.rank] = workers
            with suppress(ProcessLookupError):
                os.kill(beat.pid, STACK)
        if failing is not None and now - failing > _PATIENCE:
            return False
        for beat in watch.silent(timeout):
            if beat.phase != "start" or watch.silence[beat.rank] > _START:
                return False
    watch.look()
    return False


def _started(folder: Path) -> list[psutil.Process]:
    """Return every process of this attempt, found by its environment even without a parent."""
    found = []
    # Not the children of torchrun: when it dies first, they lose their parent.
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(HEARTBEATS) == str(folder):
                found.append(process)
    return found


class Tail:
    """Show the output of this machine's first rank, up to its own report of a failure."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._file: BinaryIO | None = None  # kept open, in case the folder of logs is removed
        self._shown = 0  # bytes
        # A read may end within a character.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def show(self) -> None:
        """Write new output to standard output."""
        rank = self._watch.shown
        if rank is None:
            return
        data = b""
        with suppress(OSError):  # removed, or on a server that has lost it
            self._file = self._file or log_file(self._watch.logs, rank).open("rb")
            self._file.seek(self._shown)
            data = self._file.read()
        # Read after the log: a rank records a failure before it prints anything about it.
        failure = failures.read_failures(self._watch.folder).get(rank)
        if failure is not None:
            data = data[: max(0, failure.log_size - self._shown)]
        self._shown += len(data)
        with suppress(OSError):  # the terminal or pipe is closed
            sys.stdout.write(self._decoder.decode(data))
            sys.stdout.flush()


def say(text: str) -> None:
    """Print a line of the supervisor to standard error."""
    with suppress(OSError):  # the terminal or pipe is closed
        complain(text)
