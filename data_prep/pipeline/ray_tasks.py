"""Run units as tasks of Ray, on this machine or on a cluster."""

from __future__ import annotations

import os
import secrets
import site
import socket
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

from data_prep import CorpusError
from data_prep.messages import error_line, extra, one_line
from data_prep.pipeline.processes import Function, Results, Work, WorkerDiedError, set_up
from data_prep.pipeline.store import Store

_MEMORY = 2**30  # bytes that a task asks a cluster for
_AT_ONCE = 1000  # tasks that Ray holds, or two for each core of a larger cluster
_TOKEN = secrets.token_hex(32)  # for all clusters that this process starts: Ray reads it once
_seen = set[str]()  # markers that this process has seen


class _Fixed(list[str]):
    """Hold the import path of Ray's workers; ignore the working directory that Ray would add."""

    def extend(self, values: Iterable[str]) -> None:
        pass


@contextmanager
def ray_tasks(workers: int, shared: Store | None) -> Iterator[Work]:
    """Yield what runs units as Ray tasks, on RAY_ADDRESS or on `workers` local cores."""
    address = os.environ.get("RAY_ADDRESS", "")
    with _joined(address, workers) as ray:
        # A task whose worker or node dies runs again: a unit is identical wherever it is made.
        memory = _MEMORY if address else None
        task: Any = ray.remote(max_retries=1, num_cpus=1, memory=memory)(_call)
        place = _Place(os.getcwd())
        if address and shared is not None:
            place = place._replace(shared=shared, marker=f"seen-{uuid.uuid4().hex[:8]}")
            shared.write(place.marker, b"")

        def result_of(reference: Any) -> Any:
            try:
                return ray.get(reference)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None

        def work(function: Function, items: Sequence[Any], results: Results) -> None:
            at_once = max(_AT_ONCE, 2 * int(ray.cluster_resources().get("CPU", 0)))
            left = deque(range(len(items)))
            died: list[int] = []
            try:
                # A function may name a file for each unit of an earlier stage.
                once = ray.put(function)
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
                    reference = task.remote(once, items[number], place)
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
            if place.shared is not None:
                with suppress(CorpusError):
                    place.shared.delete(place.marker)


@contextmanager
def _joined(address: str, workers: int) -> Iterator[Any]:
    """Yield the module of Ray, in a cluster unless this process is in one already."""
    here = _reached_from(address) if address else None
    # A head that finds a token in its home wants one of everybody, and `ray.init` sends none to an
    # address that was named, unless it is told to before Ray is imported.
    if address and (Path.home() / ".ray" / "auth_token").is_file():
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    if not address:  # else Ray leaves a token in the home, which slows a cluster without one down
        os.environ.setdefault("RAY_AUTH_TOKEN", _TOKEN)
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
    project = str(Path(__file__).parents[2])
    job._py_driver_sys_path = _Fixed([project] if project not in site.getsitepackages() else [])
    # Where no way leads to the internet Ray takes 127.0.0.1 for its own address.
    own = {}
    if here is not None and ip_address(ray.util.get_node_ip_address()).is_loopback:
        own["_node_ip_address"] = here
    try:
        ray.init(
            # Without an address it would join a cluster that happens to run here.
            address or "local",
            num_cpus=None if address else workers,
            include_dashboard=None if address else False,
            log_to_driver=False,
            configure_logging=False,
            job_config=job,
            **own,
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
    """Hold where tasks work, and a file of a place that they must see."""

    folder: str
    shared: Store | None = None
    marker: str = ""


def num_nodes() -> int:
    """Return the nodes of the cluster that this process has joined."""
    import ray

    return sum(node["Alive"] for node in ray.nodes())


def _why_not_seen(place: _Place) -> str | None:
    """Return why this machine does not see the marker; None if it does."""
    if place.shared is None or place.marker in _seen:
        return None
    try:
        if place.shared.read(place.marker) is None:
            return ""
    except CorpusError as error:
        return str(error)
    _seen.add(place.marker)
    return None


def _not_shared(place: _Place, name: str, why: str) -> CorpusError:
    assert place.shared is not None
    if "://" in place.shared.url:
        fix = "a node has the environment of its `ray start`: set the store's variables before it"
    else:
        fix = "put it where every node of the cluster sees it, or set `work: URL`, a place "
        fix += "for what the stages write"
    why = f" ({why})" if why else ""
    return CorpusError(f"{one_line(place.shared.url)}: not seen by {name}{why}: {fix}")


def _reached_from(address: str) -> str | None:
    """Return this machine's address to a head; None if no other machine is named.

    Raises:
        CorpusError: nothing listens there: Ray ends the process without a word.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():  # "auto" and "local"
        return None
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=10) as connection:
            return str(connection.getsockname()[0])
    except (OSError, OverflowError) as error:
        raise CorpusError(
            f"RAY_ADDRESS {address}: no cluster answers ({error}): start it with `ray start "
            "--head`, or unset RAY_ADDRESS"
        ) from None


def _call(function: Callable[[Any], Any], item: Any, place: _Place) -> Any:
    set_up()
    if os.path.isdir(place.folder):  # a worker begins where `ray start` was called
        os.chdir(place.folder)
    name = socket.gethostname()
    if (why := _why_not_seen(place)) is not None:
        raise _not_shared(place, name, why)
    try:
        return function(item)
    except CorpusError as error:
        if place.shared is None or str(error).startswith(f"{name}:"):
            raise
        raise CorpusError(f"{error} (on {name})") from None
