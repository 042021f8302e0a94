"""Run work units: in this process, in a pool of processes, or with Ray."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import site
import socket
import sys
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from data_prep import CorpusError
from data_prep.messages import error_line, extra

Engine = Literal["processes", "ray"]
Function = Callable[[Any], Any]  # of a module, so that processes can import it
Report = Callable[[int, Any], None]  # (number of an item, its result), after each
MANY, FIRST = 100, 10  # failures, after which the rest is not tried; when nothing has succeeded
_MEMORY = 2**30  # bytes that a task asks a cluster for
_AT_ONCE = 1000  # tasks that Ray holds, or two for each core of a larger cluster
_DIED = (
    "its worker died twice (out of memory, killed, a document that took too long, or a script "
    "without `if __name__ == '__main__':`)"
)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


class WorkerDiedError(CorpusError):
    """Report a worker process that died without an error message."""


class FailedError(CorpusError):
    """Report the items of a run that failed, by their number, and how many were not tried."""

    def __init__(self, failures: dict[int, CorpusError], not_tried: int = 0) -> None:
        super().__init__(str(failures[min(failures)]))
        self.failures, self.not_tried = failures, not_tried


class Run(Protocol):
    """Apply a module-level function to every item; return results in the order of the items.

    An item whose function raises CorpusError is set aside, and the others go on; an item whose
    worker dies is run once more, with no other beside it, by `alone` where that is given.
    FailedError names all that failed at the end, or after many of them. Any other error ends the
    run at once. The report is called in this process, after each result, and may raise.
    """

    def __call__(
        self,
        function: Function,
        items: Sequence[Any],
        report: Report,
        alone: Function | None = None,
        /,
    ) -> list[Any]:
        """Return the results."""


class _Results:
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
_Work = Callable[[Function, Sequence[Any], _Results, Function], None]


@contextmanager
def started(
    workers: int, engine: Engine = "processes", shared: Path | None = None
) -> Iterator[Run]:
    """Yield a function that runs units, and end its processes.

    `shared` is a folder that units write to: every node of a cluster must see it.
    """
    if engine == "ray":
        begun: AbstractContextManager[_Work] = _ray(workers, shared)
    else:
        begun = nullcontext(_here) if workers == 1 else _processes(workers)
    with begun as work:

        def run(
            function: Function,
            items: Sequence[Any],
            report: Report,
            alone: Function | None = None,
        ) -> list[Any]:
            results = _Results(len(items), report)
            work(function, items, results, alone or function)
            return results.all()

        yield run


def _here(function: Function, items: Sequence[Any], results: _Results, alone: Function) -> None:
    for number, item in enumerate(items):
        results.take(number, partial(function, item))


@contextmanager
def _processes(workers: int) -> Iterator[_Work]:
    """Yield what runs units in processes, which start with more than one item."""
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")  # fork would copy threads' locks

    def new_pool() -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, mp_context=context, initializer=_begin_worker)

    # A pool for each worker: one that dies takes no other with it.
    pools = [new_pool() for _ in range(workers)]

    def work(function: Function, items: Sequence[Any], results: _Results, alone: Function) -> None:
        if len(items) < 2:
            return _here(function, items, results, alone)
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
    _set_up()
    parent = multiprocessing.parent_process()
    assert parent is not None

    def leave() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=leave, daemon=True).start()


def _set_up() -> None:
    # One worker a core is the user's choice; threads in each would multiply it.
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    return_large_blocks()


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


class _Fixed(list[str]):
    """Hold the import path of Ray's workers; ignore the working directory that Ray would add."""

    def extend(self, values: Iterable[str]) -> None:
        pass


@contextmanager
def _ray(workers: int, shared: Path | None) -> Iterator[_Work]:
    """Yield what runs units as Ray tasks, on RAY_ADDRESS or on `workers` local cores."""
    address = os.environ.get("RAY_ADDRESS", "")
    if address:
        _check_address(address)
        # A head that finds a token in its home wants one of everybody, and `ray.init` sends none to
        # an address that was named, unless it is told to before Ray is imported.
        if (Path.home() / ".ray" / "auth_token").is_file():
            os.environ.setdefault("RAY_AUTH_MODE", "token")
    # A task that exhausts a node's memory would run again without end.
    os.environ.setdefault("RAY_task_oom_retries", "1")
    try:
        import ray
    except ImportError:
        raise CorpusError(f"--engine ray: Ray is not installed: {extra('ray')}") from None
    own = not ray.is_initialized()
    if own:
        job = ray.job_config.JobConfig()
        here = str(Path(__file__).parents[2])
        job._py_driver_sys_path = _Fixed([here] if here not in site.getsitepackages() else [])
        try:
            ray.init(
                # Without an address it would join a cluster that happens to run here.
                address or "local",
                num_cpus=None if address else workers,
                include_dashboard=None if address else False,
                log_to_driver=False,
                configure_logging=False,
                job_config=job,
            )
        except (ConnectionError, RuntimeError) as error:
            raise CorpusError(
                f"--engine ray: Ray has not begun ({error_line(error)}): see `ray status`; all "
                "nodes need the same ~/.ray/auth_token, or none"
            ) from None
    # A task whose worker or node dies runs again: a unit is identical wherever it is made.
    memory = _MEMORY if address else None
    task: Any = ray.remote(max_retries=1, num_cpus=1, memory=memory)(_call)
    place = _Place(os.getcwd())
    if address and shared is not None:
        place = place._replace(output=str(shared.parent), marker=str(_mark(shared)))

    def result_of(reference: Any) -> Any:
        try:
            return ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None

    def work(function: Function, items: Sequence[Any], results: _Results, alone: Function) -> None:
        if place.marker:
            _ask_nodes(place)
        at_once = max(_AT_ONCE, 2 * int(ray.cluster_resources().get("CPU", 0)))
        left = deque(range(len(items)))
        died: list[int] = []
        try:
            # A function may name a file for each unit of an earlier stage.
            once, once_alone = ray.put(function), ray.put(alone)
            waiting: dict[Any, int] = {}
            while left or waiting:
                while left and len(waiting) < at_once:
                    number = left.popleft()
                    waiting[task.remote(once, items[number], place)] = number
                (ready,), _ = ray.wait(list(waiting))
                number = waiting.pop(ready)
                try:
                    results.take(number, partial(result_of, ready))
                except ray.exceptions.RayError:
                    died.append(number)
            for number in died:
                reference = task.remote(once_alone, items[number], place)
                try:
                    results.take(number, partial(result_of, reference))
                except ray.exceptions.RayError as error:
                    lost = f"Ray lost its task for good ({error_line(error)})"
                    results.fail(number, WorkerDiedError(lost))
        except ray.exceptions.RayError as error:
            raise WorkerDiedError(
                f"the cluster does not answer ({error_line(error)}): see `ray status`; finished "
                "units are kept"
            ) from None

    try:
        yield work
    finally:
        if place.marker:
            Path(place.marker).unlink(missing_ok=True)
        if own:
            ray.shutdown()


class _Place(NamedTuple):
    """Hold where tasks work, and a file that they must see."""

    folder: str
    output: str = ""
    marker: str = ""


def _mark(shared: Path) -> Path:
    """Write a file with a new name."""
    shared.mkdir(parents=True, exist_ok=True)
    marker = shared.resolve() / f".seen-{uuid.uuid4().hex[:8]}"
    marker.touch()
    return marker


def num_nodes() -> int:
    """Return the nodes of the cluster that this process has joined."""
    import ray

    return sum(node["Alive"] for node in ray.nodes())


def _ask_nodes(place: _Place) -> None:
    """Let each node look for the marker; CorpusError names those that do not see it."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    look: Any = ray.remote(num_cpus=0, max_retries=0)(os.path.exists)
    asked = []
    for node in ray.nodes():
        if node["Alive"]:
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            answer = look.options(scheduling_strategy=there).remote(place.marker)
            asked.append((node["NodeManagerAddress"], answer))
    try:
        blind = sorted({name for name, answer in asked if not ray.get(answer)})
    except ray.exceptions.RayError as error:
        raise WorkerDiedError(
            f"a node of the cluster does not answer ({error_line(error)})"
        ) from None
    if blind:
        raise _not_shared(place.output, ", ".join(blind))


def _not_shared(output: str, who: str) -> CorpusError:
    return CorpusError(
        f"{output}: not seen by {who}: put `output` where every node of the cluster sees it, or "
        "set `work: URL`, a place for what the stages write"
    )


def _check_address(address: str) -> None:
    """Refuse an address at which nothing listens: Ray ends the process there without a word."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():  # "auto" and "local"
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise CorpusError(
            f"RAY_ADDRESS {address}: no cluster answers ({error}): start it with `ray start "
            "--head`, or unset RAY_ADDRESS"
        ) from None


def _call(function: Callable[[Any], Any], item: Any, place: _Place) -> Any:
    _set_up()
    if os.path.isdir(place.folder):  # a worker begins where `ray start` was called
        os.chdir(place.folder)
    if place.marker and not os.path.exists(place.marker):  # a node that came later
        raise _not_shared(place.output, socket.gethostname())
    return function(item)
