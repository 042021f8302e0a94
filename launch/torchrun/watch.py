"""Observe the ranks on this machine, and find the one that caused a failure."""

from __future__ import annotations

import json
import re
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from launch.torchrun import failures
from launch.torchrun.failures import WAITED, Failure, hint, timed_out
from launch.torchrun.rank import SHOWN, log_file
from pretrain.contracts.process import ExitCode

# Phases of a step in which a rank can hang. "data" has a limit from the start. The others get one
# after a rank has left them once, because the first forward and update may compile for minutes.
_STEP = ("data", "counts", "forward", "update")
_TIMES = 10  # longer than the longest stay in this phase so far
_FEWER = (
    "if the others are gone for good, end this on every node and start with fewer --nodes; the "
    "processes of all nodes must divide train.global_batch_size"
)
_MET = re.compile(r"waiting for clients\. (\d+)/(\d+) clients joined")

# torchrun's own message about which of its processes ended first.
_FIRST = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: \d+ \(pid: (\d+)\)")
_CRASH = re.compile(r"^(Fatal Python error|terminate called|Stack \(most recent)", re.MULTILINE)


@dataclass(frozen=True)
class Beat:
    """Hold the last heartbeat of a rank."""

    rank: int
    pid: int
    host: str
    step: int
    phase: str
    background: str  # phase of the thread that writes checkpoints
    beat: int
    closed: bool

    @property
    def name(self) -> str:
        """Return the rank with its host and pid."""
        return f"rank {self.rank} ({self.host}, pid {self.pid})"

    @property
    def place(self) -> str:
        """Return the step and phase."""
        return f"step {self.step} ({', '.join(filter(None, [self.phase, self.background]))})"

    @property
    def alive(self) -> bool:
        """Return True if its process exists, running or stopped."""
        try:
            return psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


@dataclass
class Watch:
    """Hold the state of all ranks at the last look."""

    folder: Path  # where the heartbeats are
    logs: Path
    beats: dict[int, Beat] = field(default_factory=dict)
    silence: dict[int, float] = field(default_factory=dict)  # seconds without a new beat
    stood: dict[int, float] = field(default_factory=dict)  # seconds at one step and phase
    longest: dict[str, float] = field(default_factory=dict)  # seconds that a rank was in a phase
    stuck: list[Beat] = field(default_factory=list)  # `standing` when the supervisor gave up
    left: list[Beat] = field(default_factory=list)  # `awaited` at the first failure
    stopped: dict[int, str] = field(default_factory=dict)  # stopped loader workers, in words
    gone: dict[int, Beat] = field(default_factory=dict)  # ended processes, in order
    failed: dict[int, Failure] = field(default_factory=dict)
    shown: int | None = None  # the rank whose output is on the screen
    last: float = field(default_factory=time.monotonic)

    def look(self) -> None:
        """Read heartbeats and failures, and check which processes are alive."""
        now = time.monotonic()
        elapsed, self.last = min(now - self.last, 1.0), now  # this process may have been stopped
        dead = [rank for rank, beat in self.beats.items() if not beat.alive]
        for path in sorted(self.folder.glob("rank-*.json")):
            try:
                beat = Beat(**json.loads(path.read_bytes()))
            except (OSError, ValueError):  # caught while it was written
                continue
            before = self.beats.get(beat.rank, beat)
            same = beat.rank in self.beats and before == beat
            # The longest stay in each phase so far; `standing` allows ten times as much.
            if (before.step, before.phase) != (beat.step, beat.phase):
                stay = self.stood.pop(beat.rank)
                self.longest[before.phase] = max(stay, self.longest.get(before.phase, 0.0))
            self.stood[beat.rank] = self.stood.get(beat.rank, -elapsed) + elapsed
            self.silence[beat.rank] = self.silence[beat.rank] + elapsed if same else 0.0
            self.beats[beat.rank] = beat
        self.failed = failures.read_failures(self.folder)
        if self.shown is None:
            with suppress(OSError, ValueError):  # not there yet
                self.shown = int((self.folder / SHOWN).read_text())
        for rank in dead:  # only now: their last heartbeat has been read
            self.gone.setdefault(rank, self.beats[rank])

    @property
    def lost(self) -> list[Beat]:
        """Return ranks that ended without a record of a failure."""
        return [
            beat for rank, beat in self.gone.items() if not beat.closed and rank not in self.failed
        ]

    def silent(self, seconds: float) -> list[Beat]:
        """Return living ranks without a heartbeat for `seconds`."""
        return [
            self.beats[rank]
            for rank, silence in self.silence.items()
            if silence >= seconds and rank not in self.gone
        ]

    def standing(self, seconds: float) -> list[Beat]:
        """Return living ranks that have been in one phase of a step for `seconds`.

        A slow run is not interrupted: a phase may take 10 times its longest duration so far.
        """
        return [
            beat
            for rank, beat in self.beats.items()
            if beat.phase in _STEP
            and (beat.phase == "data" or beat.phase in self.longest)
            and self.stood[rank] >= max(seconds, _TIMES * self.longest.get(beat.phase, 0.0))
            and rank not in self.gone
        ]

    @property
    def waiting(self) -> list[Beat]:
        """Return ranks that ended because they waited too long for another."""
        raised = [rank for rank, failure in self.failed.items() if failure.waited]
        # NCCL's watchdog writes that to the log and aborts the process.
        aborted = [beat for beat in self.lost if timed_out(self.last_words(beat))]
        return [self.beats[rank] for rank in raised if rank in self.beats] + aborted

    @property
    def awaited(self) -> list[Beat]:
        """Return ranks in another place than those that waited for them."""
        places = {(beat.step, beat.phase) for beat in self.waiting}
        return [
            beat
            for rank, beat in self.beats.items()
            if places and rank not in self.failed and (beat.step, beat.phase) not in places
        ]

    def details(self, beat: Beat) -> str:
        """Return the end of a rank's log, unless it is on the screen already."""
        return "" if beat.rank == self.shown else self.last_words(beat)

    def last_words(self, beat: Beat) -> str:
        """Return the crash report or the requested stack in a rank's log; "" without one."""
        try:
            text = log_file(self.logs, beat.rank).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        found = _CRASH.search(text)
        return "\n".join(text[found.start() :].splitlines()[:40]) if found else ""


@dataclass(frozen=True)
class Cause:
    """Explain why an attempt ended."""

    line: str
    step: int
    exit_code: int = ExitCode.BUG
    details: str = ""  # a traceback, or the end of a log
    hint: str = ""


def cause(watch: Watch, hung: list[Beat], chatter: str, code: int | None) -> Cause:
    """Return the rank that caused the failure, and what is known about it.

    Args:
        watch: state of the ranks before the supervisor killed any.
        hung: silent ranks.
        chatter: output of torchrun.
        code: torchrun's exit code; None if the supervisor killed it.
    """
    step = max((beat.step for beat in watch.beats.values()), default=0)
    # The first failure that does not follow from another; else the first one.
    # A rank whose own error is not about another one is the cause. Prefer failures with a
    # message, then the earliest.
    order = sorted(watch.failed.values(), key=lambda f: (f.follows, not f.message, f.time))
    failure = order[0] if order else None
    if failure is not None and not failure.follows:
        return _failed(watch, failure, step)
    # A stopped process writes no error: the others did, because they waited for it.
    if hung:
        beat = max(hung, key=lambda beat: watch.silence[beat.rank])
        seconds = f"{watch.silence[beat.rank]:.0f} s"
        line = f"{beat.name} has been silent for {seconds}, last seen at {beat.place}"
        return Cause(line, step, hint="it was stopped, or hangs where Python cannot run")
    if watch.stuck:
        beat = max(watch.stuck, key=lambda beat: watch.stood[beat.rank])
        line = f"{beat.name} has stood at {beat.place} for {watch.stood[beat.rank]:.0f} s"
        advice = watch.stopped.get(beat.rank, "a loader worker, a disk or a device hangs")
        return Cause(line, step, details=watch.details(beat), hint=advice)
    # Some ranks timed out at one place. One that was elsewhere is the one they waited for.
    if watch.waiting and (awaited := watch.left or watch.awaited):
        beat, waiting = awaited[0], watch.waiting[0]
        line = f"{beat.name} stood at {beat.place}, and rank {waiting.rank} waited for it in vain"
        line += f" at {waiting.place}"
        advice = watch.stopped.get(beat.rank, WAITED)
        return Cause(line, step, details=watch.details(beat), hint=advice)
    # A rank without a record of its failure: the one that torchrun saw end first, if it names one.
    found = _FIRST.search(chatter)
    number, pid = (int(found[1]), int(found[2])) if found else (0, 0)
    first = [b for rank, b in watch.gone.items() if b.pid == pid and rank not in watch.failed]
    if first or watch.lost:
        lost, number = (first[0], number) if first else (watch.lost[0], 0)
        line = f"{lost.name} ended without a word at {lost.place}: {_how(number)}"
        return Cause(
            line, lost.step, details=watch.details(lost), hint=hint(watch.last_words(lost))
        )
    if failure is not None:
        return _failed(watch, failure, step)
    # No rank has started: the nodes did not meet.
    if not watch.beats and (found := _MET.search(chatter)):
        return Cause(f"{found[1]} of {found[2]} nodes came", step, hint=_FEWER)
    if not watch.beats and re.search(r"Dist(Store|Network)Error", chatter):
        return Cause("the nodes did not meet", step, hint=_FEWER)
    how = "killed" if code is None else _how(code)
    return Cause(f"torchrun ended: {how}", step, details="\n".join(chatter.splitlines()[-20:]))


def _failed(watch: Watch, failure: Failure, step: int) -> Cause:
    """Describe the failure that a rank has recorded."""
    beat = watch.beats.get(failure.rank)
    place = beat.place if beat else "its start"
    name = f"rank {failure.rank} ({failure.host}, pid {failure.pid})"
    if not failure.message:
        line = f"{name} ended at {place} with exit code {failure.exit_code} and no message"
        return Cause(line, step, failure.exit_code)
    if failure.exit_code in (ExitCode.MISTAKE, ExitCode.NOT_FINITE):
        return Cause(failure.message, step, failure.exit_code)
    line = f"{name} failed at {place}: {failure.message.splitlines()[0]}"
    step = beat.step if beat else step
    return Cause(line, step, failure.exit_code, failure.traceback.rstrip(), failure.hint)


def _how(code: int) -> str:
    """Explain the exit code of a process that left no message."""
    if code > 0:
        return f"exit code {code}"
    if code == 0:
        return "unknown exit code; possibly out of memory"
    known = {-int(number): number.name for number in signal.Signals}
    guesses = {
        -signal.SIGKILL: ", perhaps out of memory",
        -signal.SIGBUS: ", as when a shard is cut off while it is read; `distil verify` its folder",
    }
    return f"killed by {known.get(code, f'signal {-code}')}{guesses.get(code, '')}"
