"""One start of torchrun and its ranks: watched, told to stop, ended."""

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
from launch.torchrun.command import ENTRY
from launch.torchrun.rank import LOGS, STACK, log_file
from launch.torchrun.watch import Beat, Cause, Watch, cause
from pretrain.monitor.heartbeat import FOLDER, STORE

_POLL = 0.1  # seconds
_PATIENCE = 5.0  # seconds from the first failure to the end of all
_START = 300.0  # seconds: while libraries are read from a cold disk, no heartbeat comes


@dataclass(frozen=True)
class Ended:
    """How an attempt ended."""

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
    """Run torchrun until it and all that it started have ended.

    Args:
        argv: python ENTRY torch.distributed.run OPTIONS ENTRY MODULE ...
        folder: an empty one, for heartbeats.
        logs: a folder.
        environment: what torchrun and the ranks find beside this process's own.
        timeout: seconds of silence after which a rank is taken for hung.
        grace: seconds from a signal to the end of all.
        loopback: let the processes meet in files, and talk on the loopback interface.
        signals: when signals came (monotonic); may grow meanwhile.
    """
    options, here = _rendezvous(folder) if loopback else ([], {})
    options += ["--log-dir", str(folder)]  # else a new folder of TMPDIR, which stays
    at = argv.index(ENTRY, 3)
    command = [*argv[:3], *options, *argv[3:at], ENTRY, "launch.torchrun.rank", *argv[at + 1 :]]
    name = "torchrun.log" if loopback else f"torchrun-{socket.gethostname()}.log"
    with (logs / name).open("wb") as chatter:
        torchrun = subprocess.Popen(
            command,
            env={**os.environ, **environment, **here, FOLDER: str(folder), LOGS: str(logs)},
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
        _end_ranks(torchrun, folder)
        with suppress(subprocess.TimeoutExpired):
            torchrun.wait(3)  # for what it has to say
        code = torchrun.poll()
    finally:
        _end_all(torchrun, folder)
    watch.failed = failures.read(folder)
    tail.show()
    text = ""
    with suppress(OSError):  # the folder was removed
        text = (logs / name).read_text(encoding="utf-8", errors="replace")
    return Ended(code, bool(watch.failed), forced, cause(watch, hung, text, code))


def _rendezvous(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Options and environment with which no store listens on TCP, and gloo on loopback.

    Any user of the machine could write to a store on loopback, and torchrun keeps a pickle in its
    own. `folder` is this user's alone.
    """
    interface = "lo" if sys.platform == "linux" else "lo0"
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    environment = {name: os.environ.get(name, interface) for name in names}
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
    """Watch until torchrun has ended, or all are to be killed; True if that is for a signal."""
    told = failing = None  # when
    while torchrun.poll() is None:
        time.sleep(_POLL)
        watch.look()
        tail.show()
        now = time.monotonic()
        if signals and told is None:
            told = now
            _tell(torchrun, watch)
            say(f"told to stop: at most {grace:g} s to save and end; a second signal kills")
        # One signal may arrive twice, from a scheduler's step and from its script.
        if told is not None and (now - told > grace or signals[-1] - signals[0] > 1):
            return True
        if failing is None and (watch.failed or watch.lost):
            failing = now
            watch.left = watch.awaited  # torchrun is about to stop them, and they will move
            for beat in watch.left:
                watch.examine(beat)
                _stack(beat)
        # Later than a collective operation, whose error names the rank that is waited for.
        if failing is None and (stuck := watch.standing(timeout + _PATIENCE)):
            failing, watch.stuck = now, stuck
            for beat in stuck:
                watch.examine(beat)
                _stack(beat)
        if failing is not None and now - failing > _PATIENCE:
            return False
        for beat in watch.silent(timeout):
            if beat.phase != "start" or watch.silence[beat.rank] > _START:
                return False
    watch.look()
    return False


def _tell(torchrun: subprocess.Popen[bytes], watch: Watch) -> None:
    """Ask the ranks to save and end; torchrun ends with them, and by itself if there are none.

    Slurm has told torchrun as well; a third signal would make it leave its ranks behind.
    """
    for beat in watch.beats.values():
        with suppress(ProcessLookupError):
            os.kill(beat.pid, signal.SIGTERM)
    if not watch.beats:
        torchrun.terminate()


def _stack(beat: Beat) -> None:
    with suppress(ProcessLookupError):
        os.kill(beat.pid, STACK)


def _started(folder: Path) -> list[psutil.Process]:
    """Return every process of this attempt: the environment tells, whatever has become of its
    parent."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(FOLDER) == str(folder):
                found.append(process)
    return found


def _end_ranks(torchrun: subprocess.Popen[bytes], folder: Path) -> None:
    for process in _started(folder):
        if process.pid != torchrun.pid:
            with suppress(psutil.Error):
                process.kill()


def _end_all(torchrun: subprocess.Popen[bytes], folder: Path) -> None:
    torchrun.kill()
    torchrun.wait()
    deadline = time.monotonic() + 10  # a process in the kernel's hands ends when that lets go
    while (left := _started(folder)) and time.monotonic() < deadline:
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=1)


class Tail:
    """Shows the output of this machine's first rank, but not what it says of a failure."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._file: BinaryIO | None = None  # kept open: the folder of logs may be removed
        self._shown = 0  # bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def show(self) -> None:
        """Write what is new to standard output."""
        rank = self._watch.shown
        if rank is None:
            return
        data = b""
        with suppress(OSError):  # removed, or on a server that has lost it
            self._file = self._file or log_file(self._watch.logs, rank).open("rb")
            self._file.seek(self._shown)
            data = self._file.read()
        # Asked after the reading: a failure is recorded before anything is printed of it.
        failure = failures.read(self._watch.folder).get(rank)
        if failure is not None:
            data = data[: max(0, failure.log_size - self._shown)]
        self._shown += len(data)
        with suppress(OSError):  # nobody looks any more
            sys.stdout.write(self._decoder.decode(data))
            sys.stdout.flush()


def say(text: str) -> None:
    """A line of the supervisor's own."""
    with suppress(OSError):  # nobody looks any more
        complain(text)
