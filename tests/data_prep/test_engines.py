"""Check that processes and Ray run the same units, and name failures in a sentence."""

import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest

from data_prep import CorpusError
from data_prep.pipeline.engines import Engine, Report, WorkerDiedError, started


def run(
    function: Any,
    items: list[Any],
    workers: int,
    report: Report = lambda done, total: None,
    engine: Engine = "processes",
) -> list[Any]:
    with started(workers, engine) as begun:
        return begun(function, items, report)


def double_or_fail(unit: int) -> int:
    if unit < 0:
        raise CorpusError(f"unit {unit}")
    if unit > 100:
        os._exit(1)  # as a kill for want of memory does
    return 2 * unit


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_order_and_an_error_is_raised(workers: int) -> None:
    assert run(double_or_fail, list(range(20)), workers) == [2 * unit for unit in range(20)]
    with pytest.raises(CorpusError, match="unit -1"):
        run(double_or_fail, [1, 2, -1, 3], workers)


def fail_or_write_late(path: str) -> None:
    if not path:
        raise CorpusError("the first failure")
    time.sleep(60)
    Path(path).touch()


def test_a_failure_does_not_wait_for_the_others(tmp_path: Path) -> None:
    late = tmp_path / "late"
    with pytest.raises(CorpusError, match="the first failure"):
        run(fail_or_write_late, [str(late), "", str(late)], 2)
    # `run` returns only when its workers are gone
    assert not late.exists() and not multiprocessing.active_children()


def test_a_dead_worker_is_reported_in_one_sentence() -> None:
    with pytest.raises(WorkerDiedError, match="a worker process died"):
        run(double_or_fail, [1, 101], 2)


class Once:
    """Kill the process at the first call in a fresh folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, unit: int) -> int:
        try:
            (self.folder / f"{unit}").touch(exist_ok=False)
        except FileExistsError:
            return unit
        os.kill(os.getpid(), 9)
        raise AssertionError


@pytest.mark.slow
def test_ray_gives_results_in_order_and_errors_as_they_are(ray: Engine) -> None:
    seen: list[tuple[int, int]] = []
    found = run(double_or_fail, list(range(5)), 2, lambda *passed: seen.append(passed), ray)
    assert found == [0, 2, 4, 6, 8] and sorted(seen) == list(enumerate(found))
    with pytest.raises(CorpusError, match=r"^unit -1$"):
        run(double_or_fail, [1, -1], 2, engine=ray)


@pytest.mark.slow
def test_a_task_of_a_killed_ray_worker_runs_again(ray: Engine, tmp_path: Path) -> None:
    assert run(Once(tmp_path), [1, 2, 3], 2, engine=ray) == [1, 2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "3"]
    with pytest.raises(WorkerDiedError, match="Ray lost a task"):
        run(double_or_fail, [101], 1, engine=ray)
