"""Lock a shared folder (NFS, Lustre, local) so that a dead host cannot keep the lock.

A lock is a row of files, `NAME.000001.lock`, `NAME.000002.lock`, ...: generations. Creating the
next one exclusively is the only thing that takes a lock, so each generation has one owner and the
newest is the holder. Nothing is renamed, and what a suspended process still writes goes to its own
file. A holder removes the generations before the last few. So the newest is always there, and a
process that creates a number again, after it was removed, finds a higher one and gives way.

A file holds a record of `RECORD` bytes, rewritten with a higher counter every few seconds. Any
byte after it means that the generation is over: released by its owner, or taken over. No clock is
compared with another's, and no `fcntl`, which shared file systems do not all honour.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from itertools import count
from pathlib import Path
from typing import NamedTuple

from data_prep import CorpusError

RECORD = 1024  # bytes
KEPT = 8  # generations before the newest: between two looks of a contender there are never as many
_OVER = b"over\n"
_POLL = 1.0  # seconds

Waiting = Callable[[float, str], None]


class Busy(CorpusError):
    """Report that a living process holds the lock."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Identify a process by its machine (host, boot, pid namespace), pid and start time."""

    host: str
    boot: str
    namespace: str
    pid: int
    start: str

    @property
    def machine(self) -> tuple[str, str, str]:
        """Return what is equal only where pids are shared; clones of a machine share boot ids."""
        return self.host, self.boot, self.namespace

    @property
    def named(self) -> str:
        """Return host and pid."""
        return f"host {self.host}, pid {self.pid}"


@dataclass(eq=False)
class Lock:
    """Hold a lock of this process; call `check()` between units of work."""

    _path: Path
    _following: Path
    _owner: Identity
    _about: str
    _who: str
    _token: str = field(default_factory=lambda: uuid.uuid4().hex)
    _counter: int = 0
    _over: bool = False
    _mutex: threading.Lock = field(default_factory=threading.Lock)
    _stop: threading.Event = field(default_factory=threading.Event)

    def check(self) -> None:
        """Raise Busy if another process took over while this one stood still."""
        if not self._beat():
            if not self._path.exists():
                raise Busy(
                    f"{self._about}: its lock file {self._path} is gone: the folder was removed or "
                    f"moved, or another `{self._who}` finished and tidied up; look, then run again"
                )
            other = _named(parse_identity(_read(self._following)))
            raise Busy(
                f"{self._about}: another `{self._who}` ({other}) took over while this one "
                "stood still: leave the work to it"
            )

    def _beat(self) -> bool:
        """Write the next counter; return False, from then on, if the lock is no longer ours."""
        with self._mutex:
            if self._over:
                return False
            # On NFS a folder's entries may be a minute old, but a file is fresh when opened:
            # whoever takes over marks this one. It may die before it does, so its own file is
            # looked for as well, once this one is closed and thereby on the server.
            try:
                with self._path.open("r+b", buffering=0) as file:
                    found = file.read(2 * RECORD)
                    # A write that failed may have reached the server: any record of ours will do.
                    ours = self._token.encode() in found or (not found and self._counter == 0)
                    ours &= len(found) <= RECORD
                    if ours:
                        counter = {"token": self._token, "counter": self._counter + 1}
                        values = asdict(self._owner) | counter
                        record = json.dumps(values).encode().ljust(RECORD - 1) + b"\n"
                        assert len(record) == RECORD
                        file.seek(0)
                        file.write(record)
                self._counter += ours
                self._over = not ours or self._following.exists()
            except FileNotFoundError:  # the folder is gone: the work is finished
                self._over = True
            return not self._over

    def _keep(self, seconds: float) -> None:
        while not self._stop.wait(seconds):
            # A server that does not answer now may at the next beat.
            with contextlib.suppress(OSError):
                if not self._beat():
                    return


@contextmanager
def lock(
    folder: Path,
    name: str,
    *,
    patience: float = 60.0,
    beat: float = 5.0,
    output: Path | None = None,
    waiting: Waiting | None = None,
    identity: Identity | None = None,
    who: str = "distil prepare",
) -> Iterator[Lock]:
    """Hold the lock `name` of `folder`, made if missing; Busy if another process is at work.

    A holder on this machine is known to be alive or dead at once. One on another machine is
    watched: Busy as soon as its counter moves, taken over if it stands still for `patience`
    seconds, and `waiting(seconds_left, host)` is called about once a second meanwhile. A holder
    writes every `beat` seconds, from a thread: all processes need the same two numbers. Messages
    name `output` (default: `folder`) and `who`, the command of the other process. `identity`
    defaults to this process.

    After a takeover two processes may work until the old one calls `Lock.check`: what they write
    must be the same bytes, renamed into place.
    """
    assert 0 < 2 * beat <= patience
    contender = _Contender(
        folder, name, output or folder, patience, waiting, identity or this_process(), who
    )
    held = contender.take()
    keeper = threading.Thread(target=held._keep, args=(beat,), daemon=True)
    try:
        keeper.start()
        yield held
    finally:
        held._stop.set()
        with held._mutex:
            if not held._over:
                held._over = True
                _end(held._path)


class Held(NamedTuple):
    """Hold who has a lock, or had it last."""

    process: Identity | None  # None: nobody, or its file is torn
    alive: bool | None  # None: on another machine, which cannot be asked
    generation: int  # how often the lock was taken

    @property
    def named(self) -> str:
        """Return host and pid."""
        return _named(self.process)


def holder(folder: Path, name: str) -> Held:
    """Return who holds the lock; take nothing."""
    contender = _Contender(folder, name, folder, 60.0, None, this_process(), "")
    newest = max(contender.generations(), default=0)
    data = _read(contender.path(newest)) if newest else None
    process = parse_identity(data)
    if data is None or process is None or len(data) > RECORD:
        return Held(process, False, newest)
    near = process.machine == contender.owner.machine
    return Held(process, is_alive(process) if near else None, newest)


def refuse_if_held(folder: Path, name: str, *, who: str = "distil prepare") -> None:
    """Raise Busy at once if a living process of this machine holds the lock; take nothing."""
    held = holder(folder, name)
    if held.alive:
        raise _Contender(folder, name, folder, 60.0, None, this_process(), who).busy(held.process)


def this_process() -> Identity:
    """Return the identity of this process."""
    host, pid = socket.gethostname(), os.getpid()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        # macOS: tell machines of the same name apart by the network card. Windows: os.kill would
        # end the process it asks about, so every other process counts as remote.
        boot = f"{uuid.getnode():x}" if os.name == "posix" else uuid.uuid4().hex
        namespace = ""
    return Identity(host, boot, namespace, pid, _started(pid) or "")


@dataclass(frozen=True, slots=True)
class _Contender:
    """Hold a process that wants a lock."""

    folder: Path
    name: str
    output: Path
    patience: float
    waiting: Waiting | None
    owner: Identity
    who: str

    def path(self, generation: int) -> Path:
        return self.folder / f"{self.name}.{generation:06d}.lock"

    def generations(self) -> list[int]:
        """Return the numbers that a listing shows."""
        pattern = re.compile(re.escape(self.name) + r"\.(\d{6,})\.lock")
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        return [int(found[1]) for name in names if (found := pattern.fullmatch(name))]

    def take(self) -> Lock:
        """Create the generation after the newest, once that is over; Busy if it is not."""
        known = 0  # a generation that exists, whatever a cached folder says
        while True:
            known = max([known, *self.generations()])
            newest = next(n for n in count(known) if not self.path(n + 1).exists())
            known = 0
            before = _read(self.path(newest)) if newest else None
            if newest == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
            elif before is None or not self._is_over(newest):
                continue
            try:
                self.path(newest + 1).open("xb").close()
            except FileExistsError:  # one contender creates it, the others look again
                known = newest + 1
                continue
            except FileNotFoundError:  # the folder was removed: numbers start again
                continue
            # This process may have stood still since it looked, and this number was removed, or the
            # folder was made again. On NFS, too, a listing is fresh after one's own creation.
            others = self.generations()
            after = _read(self.path(newest)) if newest else None
            changed = before is not None and (after is None or after[:RECORD] != before[:RECORD])
            if changed or max(others, default=0) > newest + 1:
                self.path(newest + 1).unlink(missing_ok=True)
                continue
            if newest:
                _end(self.path(newest))
            for generation in sorted(others):
                if generation <= newest - KEPT:
                    with contextlib.suppress(OSError):  # another user's
                        self.path(generation).unlink(missing_ok=True)
            # A process that dies here leaves an empty file: one that does not change. If it stands
            # still here until another takes over, its first beat finds that out.
            about = f"{self.output}: {self.name}"
            held = Lock(self.path(newest + 1), self.path(newest + 2), self.owner, about, self.who)
            if held._beat():
                return held

    def busy(self, holder: Identity | None) -> Busy:
        """Return the error that names who has the lock."""
        return Busy(
            f"{self.output}: another `{self.who}` ({_named(holder)}) is at work on {self.name}: "
            "wait for it"
        )

    def _is_over(self, generation: int) -> bool:
        """Return True if the lock is over, False if its files changed; raise Busy if it is held."""
        # Reads are counted, not seconds: while this process was suspended, or the server hung (and
        # the holder with it), nobody watched.
        polls = max(10, round(self.patience / _POLL))
        first = _read(self.path(generation))
        holder = parse_identity(first)
        for poll in range(polls + 1):
            data = first if poll == 0 else _read(self.path(generation))
            if data is None or self.path(generation + 1).exists():
                return False
            if len(data) > RECORD:
                return True
            holder = parse_identity(data) or holder
            near = holder is not None and holder.machine == self.owner.machine
            if near and holder is not None and not is_alive(holder):
                return True
            if near or data != first:
                raise self.busy(holder)
            if poll < polls:
                if self.waiting is not None:
                    left = self.patience * (1 - poll / polls)
                    self.waiting(left, holder.host if holder else "unknown")
                time.sleep(self.patience / polls)
        return True


def _named(holder: Identity | None) -> str:
    return holder.named if holder else "host unknown"


def _read(path: Path) -> bytes | None:
    """Return the bytes of a lock file; None if its folder was removed."""
    try:
        with path.open("rb", buffering=0) as file:
            return file.read(2 * RECORD)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):
            return None
        raise


def parse_identity(data: bytes | None) -> Identity | None:
    """Return the process in a record; None if the record is empty, torn or invalid."""
    try:
        values = json.loads((data or b"")[:RECORD])
        found = Identity(**{field.name: values[field.name] for field in fields(Identity)})
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    texts = (found.host, found.boot, found.namespace, found.start)
    sound = type(found.pid) is int and 0 < found.pid < 2**31
    return found if sound and all(isinstance(text, str) for text in texts) else None


def _end(path: Path) -> None:
    """Mark a generation as over, behind the record, where its owner never writes."""
    # Another user's file cannot be marked: then the next generation's file says it all. Our own
    # cannot be if the disk is full or the folder gone: then the end of this process says it.
    with contextlib.suppress(OSError), path.open("r+b", buffering=0) as file:
        file.seek(RECORD)
        file.write(_OVER)


def is_alive(process: Identity) -> bool:
    """Return whether a process of this machine still runs, and is not another with its pid."""
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    started = _started(process.pid)
    return started is None or started == process.start


def _started(pid: int) -> str | None:
    """Return a process's start in ticks since boot; "" for a zombie, None if unknown."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    values = stat.rpartition(")")[2].split()  # a command's name may hold spaces and brackets
    return "" if values[0] in "ZX" else values[19]
