"""Run work units: in this process, in a pool of processes, or with Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

from data_prep.pipeline.processes import Function, Report, Results, Work, here, processes
from data_prep.pipeline.ray_tasks import ray_tasks
from data_prep.pipeline.store import Store

Engine = Literal["processes", "ray"]
Run = Callable[[Function, Sequence[Any], Report], list[Any]]


@contextmanager
def started(
    workers: int, engine: Engine = "processes", shared: Store | None = None
) -> Iterator[Run]:
    """Yield a function that runs units, and end its processes.

    It applies a module-level function to every item, and returns results in the order of the items.
    An item whose function raises CorpusError is set aside, and the others go on; an item whose
    worker dies is run once more, with no other item beside it. FailedError names all that failed at
    the end, or after many of them. Any other error ends the run at once. The report is called in
    this process, after each result, and may raise.

    `shared` is where units write to: every node of a cluster must see it.
    """
    if engine == "ray":
        begun: AbstractContextManager[Work] = ray_tasks(workers, shared)
    else:
        begun = nullcontext(here) if workers == 1 else processes(workers)
    with begun as work:

        def run(function: Function, items: Sequence[Any], report: Report) -> list[Any]:
            results = Results(len(items), report)
            work(function, items, results)
            return results.all()

        yield run
