"""Who runs the work units: this process, or a pool of processes."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from data_prep import CorpusError

Unit = TypeVar("Unit")
Result = TypeVar("Result")


def run(
    function: Callable[[Unit], Result],
    units: Sequence[Unit],
    workers: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[Result]:
    """Apply a module-level function to every unit; results come in the order of the units.

    The first failure ends all other units and is raised. A worker that dies is a CorpusError.
    """
    report = progress or (lambda done, total: None)
    report(0, len(units))
    if workers == 1 or len(units) < 2:
        results = []
        for unit in units:
            results.append(function(unit))
            report(len(results), len(units))
        return results
    context = multiprocessing.get_context("spawn")  # fork would copy threads' locks
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(
        min(workers, len(units)), mp_context=context, initializer=_begin_worker
    ) as pool:
        try:
            futures = [pool.submit(function, unit) for unit in units]
            for done, future in enumerate(as_completed(futures), start=1):
                future.result()
                report(done, len(units))
        except BaseException as error:
            # A unit may have hours to go: its work is thrown away, so do not wait for it.
            for worker in set(multiprocessing.active_children()) - others:
                worker.terminate()
            pool.shutdown(wait=True, cancel_futures=True)
            if isinstance(error, BrokenProcessPool):
                raise CorpusError(
                    "a worker process died (out of memory, killed, or a script without "
                    "`if __name__ == '__main__':`): use fewer `workers` and run again"
                ) from None
            raise
    return [future.result() for future in futures]


def _begin_worker() -> None:
    """Leave Ctrl-C to the parent, and follow it if it is killed: no worker is left behind."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # One worker a core is the user's choice; threads in each would multiply it.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    assert parent is not None

    def leave() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=leave, daemon=True).start()
