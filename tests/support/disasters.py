"""Inflict disasters on a save, each in its own process, one after the other.

`python disasters.py FOLDER EVERY KIND...` prints a line of JSON for each. Any exit code but 0 means
that a promise was broken, and the traceback names it. EVERY is the distance between two lines of
code before which a save is killed or fails.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

from support import tiny_run

import data_prep.disk.atomic
import data_prep.disk.replacing
import pretrain.checkpoint
from pretrain.checkpoint import newest

PACKAGE = Path(pretrain.checkpoint.__file__).parent
WRITES = {
    str(PACKAGE / "commit.py"),
    data_prep.disk.atomic.__file__,
    data_prep.disk.replacing.__file__,
}
READS = {str(PACKAGE / "reading.py"), str(PACKAGE / "layout.py")}

Told = dict[str, Any]
Tell = Callable[[Told], None]


def kills(folder: Path, every: int, before: int | None) -> Iterator[Told]:
    """Kill with SIGKILL before lines of a save of step 2, over that of `before` or nothing.

    Lines that only read are left out, because they change nothing that a later line finds.
    """
    for number in count(1, every):
        root = fresh(folder, number, before)

        def save(tell: Tell, root: Path = root, number: int = number) -> None:
            def die(where: str) -> None:
                tell({"where": where})
                os.kill(os.getpid(), signal.SIGKILL)

            lines = Lines(WRITES, number, die)
            threading.settrace(lines.trace)
            tiny_run.save(tiny_run.writer(root, phase=lines.enter), 2, loss=2.0)

        killed, told = in_child(save)
        step = found(root)
        if not killed:
            assert step == 2
            return
        assert step in (before, 2), (told, step)
        save_last(root)
        yield {**told, "found": step}
        shutil.rmtree(root.parent)


def errors(folder: Path, every: int) -> Iterator[Told]:
    """Raise an OSError before lines of a save that may meet one."""
    for number in count(1, every):
        root = fresh(folder, number, 1)
        cause = (errno.EIO, errno.ENOSPC, errno.EROFS)[number % 3]

        lines = Lines(WRITES | READS, number)

        def arm(tell: Tell, lines: Lines = lines, cause: int = cause) -> None:
            def fail(where: str) -> None:
                tell({"where": where, "cause": os.strerror(cause)})
                raise OSError(cause, os.strerror(cause))

            lines.act = fail
            threading.settrace(lines.trace)

        told = fails(root, arm, lines.rest, lines.enter)
        if "where" not in told:
            return
        yield told


def large_files(folder: Path) -> Iterator[Told]:
    """Limit the size of files: from nothing, by steps, to enough."""
    free = resource.getrlimit(resource.RLIMIT_FSIZE)
    for number in count(0):
        root = fresh(folder, number, 1)
        size, cause = 1024 * number, os.strerror(errno.EFBIG)

        def arm(tell: Tell, size: int = size, cause: str = cause) -> None:
            tell({"bytes": size, "cause": cause})
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, free[1]))

        told = fails(root, arm, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, free))
        if not told["raised"] and not told["warned"]:
            return
        yield told


def full_disks(folder: Path) -> Iterator[Told]:
    """Use a file system with too few pages left, from none to enough; then a read-only one.

    It needs a mount namespace of its own.
    """
    disk = folder / "disk"
    disk.mkdir()
    mount("tmpfs", disk, "size=1m")
    for number in count(-1):
        root = fresh(disk, max(number, 0), 1)
        # Measured in full: what is left depends on pages, which only the file system knows.
        used = 4096 * (os.statvfs(disk).f_blocks - os.statvfs(disk).f_bfree)
        options = "remount,ro" if number < 0 else f"remount,size={used + 4096 * number}"
        cause = os.strerror(errno.EROFS if number < 0 else errno.ENOSPC)

        def arm(tell: Tell, options: str = options, cause: str = cause) -> None:
            tell({"options": options, "cause": cause})
            mount("tmpfs", disk, options)

        told = fails(root, arm, lambda: mount("tmpfs", disk, "remount,rw,size=1m"))
        if not told["raised"] and not told["warned"]:
            return
        yield told


def flushes(folder: Path) -> Iterator[Told]:
    """Record in order what a save over step 1 opens to write, flushes, renames and removes.

    A test cannot cut the power. A power cut would lose what was not flushed before the rename.
    """
    root = fresh(folder, 1, 1)
    told: list[Told] = []

    def audit(event: str, values: tuple[Any, ...]) -> None:
        kind = event.removeprefix("os.").removeprefix("shutil.")
        if kind == "open" and isinstance(values[0], str | Path) and values[2] & os.O_ACCMODE:
            told.append({"event": "write", "path": str(values[0])})
        elif kind in ("rename", "rmtree") and str(root) in str(values[0]):
            told.append({"event": kind, "path": str(values[0])})

    def profile(frame: FrameType, event: str, function: object) -> None:
        if event == "c_call" and function is os.fsync:
            places = frame.f_locals
            told.append({"event": "flush", "path": str(places.get("temporary", places["path"]))})

    sys.addaudithook(audit)
    threading.setprofile(profile)
    tiny_run.save(tiny_run.writer(root), 2, loss=2.0)
    yield from told


def fails(
    root: Path,
    arm: Callable[[Tell], None],
    disarm: Callable[[], object],
    phase: Callable[[str], None] = tiny_run.nothing,
) -> Told:
    """Make, in a child, a save of step 2 once `arm` was called, and a last one of step 3."""

    def work(tell: Tell) -> None:
        warned: list[str] = []
        to = tiny_run.writer(root, warn=warned.append, phase=phase)
        raised = ""
        arm(tell)
        tiny_run.save(to, 2, loss=2.0, wait=False)
        try:
            to.finish()
        except OSError as error:
            raised = str(error)
        step, names = found(root), tiny_run.names(root)
        disarm()
        tell({"found": step, "left": names, "warned": list(warned), "raised": raised})
        warned.clear()
        tiny_run.save(to, 3, loss=1.0)
        assert not warned
        save_last(root)

    killed, told = in_child(work)
    assert not killed
    assert told["found"] in (1, 2), told
    if told["raised"]:
        (line,) = told["warned"]
        start = f"{root / 'step-00000002'}: not saved: {told['cause']} ("
        assert line.startswith(start) and " bytes are needed)" in line and "\n" not in line, told
        assert told["cause"] in told["raised"] and str(root) in told["raised"], told
        assert not [name for name in told["left"] if name.startswith(".tmp")], told
    elif told["warned"]:
        (line,) = told["warned"]
        assert told["found"] == 2, told
        assert line.startswith(f"{root}: step 2 is saved, what is older not tidied up: "), told
        assert told["cause"] in line and "\n" not in line, told
    else:
        assert told["found"] == 2, told
    shutil.rmtree(root.parent)
    return told


def save_last(root: Path) -> None:
    """Save step 3, which is the best, and find nothing else there."""
    tiny_run.save(tiny_run.writer(root), 3, loss=1.0)
    assert found(root) == 3
    assert tiny_run.names(root) == ["best", "latest", "step-00000003"], tiny_run.names(root)
    for pointer in ("best", "latest"):
        assert (root / pointer).read_text() == "step-00000003\n"


def found(root: Path) -> int | None:
    """Return the step of the newest checkpoint, which must be whole."""
    saved = newest(root, lambda text: sys.exit(f"skipped: {text}"))
    assert saved is None or tiny_run.is_whole(saved), saved
    return saved and saved.step


def fresh(folder: Path, number: int, before: int | None) -> Path:
    """Return a folder of checkpoints with that of step `before`, or with none."""
    root = folder / str(number) / "checkpoints"
    if before is None:
        root.parent.mkdir()
        return root
    template = folder / "template" / "checkpoints"
    if not template.exists():
        template.parent.mkdir()
        killed, _ = in_child(lambda _: tiny_run.save(tiny_run.writer(template), before, loss=3.0))
        assert not killed and found(template) == before
    shutil.copytree(template.parent, root.parent)
    return root


class Lines:
    """Act just before the `number`th line that a thread runs of some files.

    Of a line that is repeated in one phase of a save, the first two times count.
    """

    def __init__(
        self, files: set[str], number: int, act: Callable[[str], None] = tiny_run.nothing
    ) -> None:
        self.files, self.left, self.act = files, number, act
        self.phase = ""
        self.seen: Counter[tuple[str, str, int]] = Counter()

    def enter(self, phase: str) -> None:
        """Begin a phase of the save."""
        self.phase = phase

    def rest(self) -> None:
        """Stop acting."""
        self.left = -1

    def trace(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        """Trace lines, for sys.settrace."""
        file, line = frame.f_code.co_filename, frame.f_lineno
        if file not in self.files:
            return None
        if event == "line":
            self.seen[self.phase, file, line] += 1
            self.left -= self.seen[self.phase, file, line] <= 2
            if self.left == 0:
                self.rest()
                self.act(f"{self.phase} {Path(file).name}:{line}")
        return self.trace


def in_child(work: Callable[[Tell], object]) -> tuple[bool, Told]:
    """Return whether a forked process was killed, and what it sent before."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work(lambda told: os.write(writing, json.dumps(told).encode() + b"\n"))  # type: ignore
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        lines = [json.loads(line) for line in pipe]
    _, status = os.waitpid(pid, 0)
    told = {name: value for line in lines for name, value in line.items()}
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, (status, told)
        return True, told
    assert os.WEXITSTATUS(status) == 0, told
    return False, told


def mount(kind: str, folder: Path, options: str) -> None:
    """Mount, or change a mount."""
    subprocess.run(["mount", "-t", kind, "-o", options, kind, folder], check=True)


KINDS: dict[str, Callable[[Path, int], Iterator[Told]]] = {
    "kills": lambda folder, every: kills(folder, every, 1),
    "first kills": lambda folder, every: kills(folder, every, None),
    "errors": errors,
    "large files": lambda folder, every: large_files(folder),
    "full disks": lambda folder, every: full_disks(folder),
    "flushes": lambda folder, every: flushes(folder),  # the last: it changes this process
}

if __name__ == "__main__":
    # What every child needs, once: the models, and what transformers imports when it first writes.
    # Frozen, the collector leaves it alone, and no child copies its pages.
    place, every, *kinds = sys.argv[1:]
    for step in (1, 2, 3):
        tiny_run.moments(step)
        tiny_run.student(step).save_pretrained(f"{place}/student")
    gc.freeze()
    for kind in kinds:
        (Path(place) / kind).mkdir()
        for told in KINDS[kind](Path(place) / kind, int(every)):
            print(json.dumps({"kind": kind, **told}))
