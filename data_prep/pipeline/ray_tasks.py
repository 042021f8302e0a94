"""Run units as tasks of Ray, on this machine or on a cluster."""

from __future__ import annotations

import os
import site
import socket
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from data_prep import CorpusError
from data_prep.messages import error_line, extra
from data_prep.pipeline.processes import set_up
from data_prep.pipeline.results import Function, Results, Work, WorkerDiedError

_MEMORY = 2**30  # bytes that a task asks a cluster for
_AT_ONCE = 1000  # tasks that Ray holds, or two for each core of a larger cluster


class _Fixed(list[str]):
    """Hold the import path of Ray's workers; ignore the working directory that Ray would add."""

    def extend(self, values: Iterable[str]) -> None:
        pass


@contextmanager
def ray_tasks(workers: int, shared: Path | None) -> Iterator[Work]:
    """Yield what runs units as Ray tasks, on RAY_ADDRESS or on `workers` local cores."""
    address = os.environ.get("RAY_ADDRESS", "")
    with _joined(address, workers) as ray:
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

        def work(
            function: Function, items: Sequence[Any], results: Results, alone: Function
        ) -> None:
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
                    f"the cluster does not answer ({error_line(error)}): see `ray status`; "
                    "finished units are kept"
                ) from None

        try:
            yield work
        finally:
            if place.marker:
                Path(place.marker).unlink(missing_ok=True)


@contextmanager
def _joined(address: str, workers: int) -> Iterator[Any]:
    """Yield the module of Ray, in a cluster unless this process is in one already."""
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
    if ray.is_initialized():
        yield ray
        return
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
    try:
        yield ray
    finally:
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
    set_up()
    if os.path.isdir(place.folder):  # a worker begins where `ray start` was called
        os.chdir(place.folder)
    if place.marker and not os.path.exists(place.marker):  # a node that came later
        raise _not_shared(place.output, socket.gethostname())
    return function(item)
