"""Collect what became of the units that an engine runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from data_prep import CorpusError

Function = Callable[[Any], Any]  # defined in a module, so that processes can import it
Report = Callable[[int, Any], None]  # (number of an item, its result), after each
MANY, FIRST = 100, 10  # failures, after which the rest is not tried; when nothing has succeeded


class WorkerDiedError(CorpusError):
    """Report a worker process that died without an error message."""


class FailedError(CorpusError):
    """Report the items of a run that failed, by their number, and how many were not tried."""

    def __init__(self, failures: dict[int, CorpusError], not_tried: int = 0) -> None:
        super().__init__(str(failures[min(failures)]))
        self.failures, self.not_tried = failures, not_tried


class Results:
    """Collect what became of items."""

    def __init__(self, num: int, report: Report) -> None:
        self.results: list[Any] = [None] * num
        self.failures: dict[int, CorpusError] = {}
        self.report = report
        self.num_done = 0

    def take(self, number: int, get: Callable[[], Any]) -> None:
        """Take the result of an item, or its CorpusError."""
        try:
            result = get()
        except CorpusError as error:
            self.fail(number, error)
        else:
            self.num_done += 1
            self.results[number] = result
            self.report(number, result)

    def fail(self, number: int, error: CorpusError) -> None:
        """Set an item aside."""
        self.failures[number] = error
        most = MANY
        if not self.num_done:  # a script that workers cannot import, a store that nobody reaches
            most = 1 if isinstance(error, WorkerDiedError) else min(FIRST, MANY)
        if len(self.failures) > most:
            not_tried = len(self.results) - self.num_done - len(self.failures)
            raise FailedError(self.failures, not_tried)

    def all(self) -> list[Any]:
        """Return the results of all items."""
        if self.failures:
            raise FailedError(self.failures)
        return self.results


# What an engine does: it hands each item's result or failure to the results.
Work = Callable[[Function, Sequence[Any], Results, Function], None]
