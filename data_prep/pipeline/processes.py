"""Run units in this process, or in a pool of processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from typing import Any

from data_prep.pipeline.malloc import return_large_blocks
from data_prep.pipeline.results import MANY, Function, Results, Work, WorkerDiedError

_DIED = (
    "its worker died twice (out of memory, killed, a document that took too long, or a script "
    "without `if __name__ == '__main__':`)"
)


def here(function: Function, items: Sequence[Any], results: Results, alone: Function) -> None:
    for number, item in enumerate(items):
        results.take(number, partial(function, item))


@contextmanager
def processes(workers: int) -> Iterator[Work]:
    """Yield what runs units in processes, which start with more than one item."""
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")  # fork would copy threads' locks

    def new_pool() -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, mp_context=context, initializer=_begin_worker)

    # A pool for each worker: one that dies takes no other with it.
    pools = [new_pool() for _ in range(workers)]

    def work(function: Function, items: Sequence[Any], results: Results, alone: Function) -> None:
        if len(items) < 2:
            return here(function, items, results, alone)
        left = deque(range(len(items)))
        running: dict[Future[Any], tuple[int, int]] = {}  # to the numbers of the item and the pool
        free, died = list(range(workers)), list[int]()
        try:
            while left or running or died:
                all_die = len(died) > (1 if results.num_done == 0 else MANY)
                while left and free and not all_die:
                    number, place = left.popleft(), free.pop()
                    try:
                        future = pools[place].submit(function, items[number])
                    except BrokenProcessPool:  # its worker died while it was idle
                        pools[place] = new_pool()
                        future = pools[place].submit(function, items[number])
                    running[future] = number, place
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    number, place = running.pop(future)
                    try:
                        results.take(number, future.result)
                    except BrokenProcessPool:
                        died.append(number)
                        pools[place] = new_pool()
                    free.append(place)
                while died and not running and (all_die or not left):
                    number = died.pop()
                    pools[0].shutdown()
                    pools[0] = new_pool()
                    future = pools[0].submit(alone, items[number])
                    try:
                        results.take(number, future.result)
                    except BrokenProcessPool:
                        results.fail(number, WorkerDiedError(_DIED))
        except BaseException:
            # A unit may have hours to go, and its work is thrown away: do not wait for it.
            for worker in set(multiprocessing.active_children()) - others:
                worker.terminate()
            raise

    try:
        yield work
    finally:
        for pool in pools:
            pool.shutdown(wait=True, cancel_futures=True)


def _begin_worker() -> None:
    """Ignore Ctrl-C, which the parent handles, and exit when the parent dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_up()
    parent = multiprocessing.parent_process()
    assert parent is not None

    def leave() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=leave, daemon=True).start()


def set_up() -> None:
    # One worker a core is the user's choice; threads in each would multiply it.
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    return_large_blocks()
