"""Who runs the work units: this process, a pool of processes, or Ray."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Literal, TypeVar

from data_prep import CorpusError

Item = TypeVar("Item")
Result = TypeVar("Result")
Engine = Literal["processes", "ray"]
Report = Callable[[int, int], None]  # (done, total), after each item


class WorkerDiedError(CorpusError):
    """A worker process ended without a word."""


def run(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    workers: int,
    report: Report = lambda done, total: None,
    engine: Engine = "processes",
) -> list[Result]:
    """Apply a module-level function to every item; results come in the order of the items.

    The first failure ends all others and is raised; a worker that dies is a WorkerDiedError.
    `report` is called in this process and may raise to end the run.
    """
    report(0, len(items))
    if engine == "ray":
        return _with_ray(function, items, workers, report)
    if workers == 1 or len(items) < 2:
        results = []
        for item in items:
            results.append(function(item))
            report(len(results), len(items))
        return results
    return _with_processes(function, items, workers, report)


def _with_processes(
    function: Callable[[Item], Result], items: Sequence[Item], workers: int, report: Report
) -> list[Result]:
    context = multiprocessing.get_context("spawn")  # fork would copy threads' locks
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(
        min(workers, len(items)), mp_context=context, initializer=_begin_worker
    ) as pool:
        try:
            futures = [pool.submit(function, item) for item in items]
            for done, future in enumerate(as_completed(futures), start=1):
                future.result()
                report(done, len(items))
        except BaseException as error:
            # A unit may have hours to go, and its work is thrown away: do not wait for it.
            for worker in set(multiprocessing.active_children()) - others:
                worker.terminate()
            pool.shutdown(wait=True, cancel_futures=True)
            if isinstance(error, BrokenProcessPool):
                raise WorkerDiedError(
                    "a worker process died (out of memory, killed, a document that took too long, "
                    "or a script without `if __name__ == '__main__':`): use fewer `workers` and "
                    "run again; finished units are kept"
                ) from None
            raise
    return [future.result() for future in futures]


def _begin_worker() -> None:
    """Leave Ctrl-C to the parent, and follow it if it is killed: no worker is left behind."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _use_one_thread()
    parent = multiprocessing.parent_process()
    assert parent is not None

    def leave() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=leave, daemon=True).start()


def _with_ray(
    function: Callable[[Item], Result], items: Sequence[Item], workers: int, report: Report
) -> list[Result]:
    """Ray core tasks: on the cluster of RAY_ADDRESS, else on `workers` cores of this machine."""
    try:
        import ray
    except ImportError:
        raise CorpusError(
            "--engine ray: Ray is not installed: pip install 'distil-pretraining[ray]'"
        ) from None
    own = not ray.is_initialized()
    if own:
        cluster = bool(os.environ.get("RAY_ADDRESS"))
        ray.init(
            num_cpus=None if cluster else workers,
            include_dashboard=None if cluster else False,
            log_to_driver=False,
            configure_logging=False,
        )
    try:
        # A task whose worker or node dies runs again: a unit is the same whoever makes it.
        task: Any = ray.remote(max_retries=3, num_cpus=1)(_call)
        waiting = {task.remote(function, item): number for number, item in enumerate(items)}
        results: list[Any] = [None] * len(items)
        while waiting:
            (ready,), _ = ray.wait(list(waiting))
            results[waiting.pop(ready)] = ray.get(ready)
            report(len(items) - len(waiting), len(items))
        return results
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise WorkerDiedError(
            f"Ray lost a task for good ({' '.join(str(error).split())[:200]}): run the same "
            "command again; finished units are kept"
        ) from None
    finally:
        if own:
            ray.shutdown()


def _call(function: Callable[[Item], Result], item: Item) -> Result:
    _use_one_thread()
    return function(item)


def _use_one_thread() -> None:
    # One worker a core is the user's choice; threads in each would multiply it.
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
