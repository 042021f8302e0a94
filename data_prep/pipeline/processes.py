"""Run units in this process or in a pool of processes, and collect what became of them."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
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
Work = Callable[[Function, Sequence[Any], Results], None]


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # constants of glibc's malloc.h


def return_large_blocks() -> None:
    """Make malloc return every block of a mebibyte or more when it is freed.

    glibc raises its threshold to 32 MiB over time, and long texts of different sizes then fragment
    the heap: 550 MB after a gigabyte of text, compared with 130. Other systems are left alone.
    """
    _set_malloc({_M_MMAP_THRESHOLD: 2**20})


def keep_large_blocks() -> None:
    """Make malloc keep freed blocks again, up to the ceilings of glibc's own adjustment.

    A run in a process that has prepared a corpus waits for new pages in each step otherwise: the
    demo trained at half the speed.
    """
    _set_malloc({_M_MMAP_THRESHOLD: 2**25, _M_TRIM_THRESHOLD: 2**26})


def _set_malloc(values: Mapping[int, int]) -> None:
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
        if mallopt is not None:
            for parameter, value in values.items():
                mallopt(parameter, value)


_DIED = (
    "its worker died twice (out of memory, killed, a document that took too long, or a script "
    "without `if __name__ == '__main__':`)"
)


def here(function: Function, items: Sequence[Any], results: Results) -> None:
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

    def work(function: Function, items: Sequence[Any], results: Results) -> None:
        if len(items) < 2:
            return here(function, items, results)
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
                    future = pools[0].submit(function, items[number])
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
