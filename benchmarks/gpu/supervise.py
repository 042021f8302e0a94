"""Sections run in a process of their own, which may hang or die without taking the report along.

A kernel that goes wrong leaves its whole process without a GPU, and a compilation may take for
ever: the one who waits for the figures touches no GPU, gives every section a time limit, and starts
another process for the sections that are left.

Orders go down the worker's standard input and answers come up its standard output, a line of JSON
each.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from benchmarks.gpu.report import Report

NO_TIME = "no time"


Environment = Sequence[tuple[str, str]]


class Section(NamedTuple):
    """Rows that are measured together."""

    name: str
    rows: Sequence[str]
    least: float  # seconds; with less than these left it is not begun
    most: float  # seconds; after these it is ended
    environment: Environment = ()  # what its process must be started with


class Answer(NamedTuple):
    """A row as the worker sends it: the arguments of `Report.put`."""

    name: str
    value: float | None
    note: str = ""
    detail: Mapping[str, Any] = {}
    failed: bool = False


Work = Callable[[Sequence[str]], Iterator[Answer]]  # given the names of rows that FAILED so far


def work(
    facts: Mapping[str, Any], sections: Mapping[str, Work], is_well: Callable[[], bool]
) -> None:
    """The worker: say the `facts`, then carry out orders until there are none.

    It ends when `is_well` says that no more can be measured in this process.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever libraries print must not look like an answer
    print(json.dumps({"facts": facts}), file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        last: dict[str, Any] = {"done": True}
        try:
            for answer in sections[order["section"]](order["failed"]):
                print(json.dumps({"row": answer}), file=answers, flush=True)
        except Exception as error:
            traceback.print_exc()
            last["error"] = describe(error)
        last["well"] = is_well()
        print(json.dumps(last), file=answers, flush=True)
        if not last["well"]:
            return


def guarded(name: str, measure: Callable[[], float]) -> Answer:
    """A row's answer; an error is this row's own, and the next one is measured all the same."""
    try:
        return Answer(name, measure())
    except Exception as error:
        traceback.print_exc()
        return Answer(name, None, describe(error), failed=True)


def describe(error: BaseException) -> str:
    """An error in one line."""
    lines = traceback.format_exception_only(type(error), error)[-1].strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


class Supervisor:
    """Carries sections out, one after the other, until the time is over; end it with `close`.

    Args:
        report: takes the rows.
        command: starts a worker.
        deadline: on the monotonic clock.
        grace: seconds that a worker may take to start.
    """

    def __init__(
        self, report: Report, command: Sequence[str], deadline: float, grace: float = 150.0
    ) -> None:
        self.report, self.command, self.deadline, self.grace = report, command, deadline, grace
        self._worker: _Worker | None = None

    def start(self, environment: Environment = ()) -> str | None:
        """Have a worker that was started with this environment; what went wrong, if it did."""
        if self._worker is not None and self._worker.environment == environment:
            return None
        self.close()
        self._worker = worker = _Worker(self.command, environment)
        answer = worker.answer(min(time.monotonic() + self.grace, self.deadline))
        if isinstance(answer, str):
            self.close()
            return answer
        self.report.facts |= answer["facts"]
        return None

    def run(self, sections: Sequence[Section]) -> None:
        """Measure what fits; whatever has no figure in the end says why."""
        for section in sections:
            if self.deadline - time.monotonic() < section.least:
                self.report.give_up(section.rows, NO_TIME)
                continue
            began = time.monotonic()
            error = self.start(section.environment) or self._carry_out(section)
            took = round(time.monotonic() - began, 1)
            print(f"{section.name}: {took} s{f', {error}' if error else ''}", file=sys.stderr)
            self.report.facts.setdefault("seconds", {})[section.name] = took
            if time.monotonic() >= self.deadline and error:
                self.report.give_up(section.rows, NO_TIME)
            else:
                self.report.give_up(section.rows, error or "no figure", failed=True)

    def close(self) -> None:
        """End the worker, whatever it is doing."""
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    def _carry_out(self, section: Section) -> str | None:
        assert self._worker is not None
        end = min(time.monotonic() + section.most, self.deadline)
        self._worker.order({"section": section.name, "failed": self.report.failures})
        while True:
            answer = self._worker.answer(end)
            if isinstance(answer, str):
                self.close()
                return answer
            if "row" in answer:
                name, value, note, detail, failed = answer["row"]
                self.report.put(name, value, note, failed=failed, **detail)
                continue
            if not answer["well"]:
                self.close()
            error: str | None = answer.get("error")
            return error


class _Worker:
    def __init__(self, command: Sequence[str], environment: Environment) -> None:
        self.environment = environment
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **dict(environment)},
            start_new_session=True,  # compilers are processes of their own, and must end with it
        )
        self._began = time.monotonic()
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def order(self, order: Mapping[str, Any]) -> None:
        """Give it something to do; that it is dead shows when it does not answer."""
        assert self.process.stdin is not None
        self._began = time.monotonic()
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()

    def answer(self, end: float) -> dict[str, Any] | str:
        """Its next answer, or what is wrong with it if there is none until `end`."""
        try:
            line = self._lines.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            return f"no answer within {time.monotonic() - self._began:.0f} s"
        if line is None:
            code = self.process.wait()
            return f"its process died: {f'signal {-code}' if code < 0 else f'exit code {code}'}"
        found: dict[str, Any] = json.loads(line)
        return found

    def end(self) -> None:
        """Kill it with all its children."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)
