"""Check that processes and Ray run the same units, and name failures in a sentence."""

import multiprocessing
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data_prep import CorpusError
from data_prep.pipeline import processes, ray_tasks
from data_prep.pipeline.engines import Engine, started
from data_prep.pipeline.processes import FailedError, Report, WorkerDiedError


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


@pytest.mark.parametrize("workers", [1, 2])
def test_items_that_fail_are_set_aside(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    with pytest.raises(FailedError, match=r"^unit -2$") as error:
        run(double_or_fail, [1, -2, 3, -4, 5], workers, lambda n, result: done.append(result))
    assert sorted(done) == [2, 6, 10] and error.value.not_tried == 0
    assert {n: str(e) for n, e in error.value.failures.items()} == {1: "unit -2", 3: "unit -4"}
    monkeypatch.setattr(processes, "MANY", 2)
    with pytest.raises(FailedError) as error:
        run(double_or_fail, [-1] * 9, workers)
    assert len(error.value.failures) == 3 and error.value.not_tried >= 6 - workers


def fail_or_write_late(path: str) -> None:
    if not path:
        raise RuntimeError("a bug")
    time.sleep(60)
    Path(path).touch()


def test_a_bug_does_not_wait_for_the_others(tmp_path: Path) -> None:
    late = tmp_path / "late"
    with pytest.raises(RuntimeError, match="a bug"):
        run(fail_or_write_late, [str(late), "", str(late)], 2)
    # `run` returns only when its workers are gone
    assert not late.exists() and not multiprocessing.active_children()


def test_items_that_end_their_workers_twice_are_set_aside() -> None:
    items = [1, 101, 2, 3, 4, 102, 5, 6]
    done: list[int] = []
    with pytest.raises(FailedError, match=r"^its worker died twice \(out of memory") as error:
        run(double_or_fail, items, 3, lambda number, result: done.append(result))
    assert sorted(done) == [2, 4, 6, 8, 10, 12]
    assert {n: type(e) for n, e in error.value.failures.items()} == dict.fromkeys(
        (1, 5), WorkerDiedError
    )


def test_workers_that_all_die_end_the_run_at_once() -> None:
    with pytest.raises(FailedError, match="if __name__") as error:
        run(double_or_fail, [101] * 50, 2)
    assert len(error.value.failures) == 2 and error.value.not_tried == 48


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


def test_a_task_of_a_killed_worker_runs_again_with_no_other_beside_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    with started(3) as begun:
        begun(Beside(log), [0, 1, 2, 101, 3, 4], lambda number, result: None)
    noted = log.read_text(encoding="utf-8").split()
    assert noted[-2:] == ["alone", "ended"] and noted.count("alone") == 1, noted
    (tmp_path / "once").mkdir()
    assert run(Once(tmp_path / "once"), list(range(6)), 3) == list(range(6))


def test_a_worker_that_dies_while_it_is_idle_is_replaced() -> None:
    before = set(multiprocessing.active_children())
    with started(2) as begun:
        assert begun(double_or_fail, [1, 2, 3], lambda number, result: None) == [2, 4, 6]
        for worker in set(multiprocessing.active_children()) - before:
            worker.kill()
            worker.join()
        time.sleep(0.5)
        assert begun(double_or_fail, [1, 2, 3], lambda number, result: None) == [2, 4, 6]


class Beside:
    """Note the begin and the end of each call; the first call of 101 ends its process."""

    def __init__(self, log: Path) -> None:
        self.log = log

    def note(self, text: str) -> None:
        with self.log.open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")

    def __call__(self, unit: int) -> int:
        self.note("alone" if unit > 100 and "died" in self.log.read_text() else "begun")
        time.sleep(0.1)
        if unit > 100 and "died" not in self.log.read_text():
            self.note("died")
            os._exit(1)
        self.note("ended")
        return unit


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
    with pytest.raises(FailedError, match="Ray lost its task for good") as error:
        run(double_or_fail, [1, 101, -1, 2], 1, engine=ray)
    kinds = {number: type(each) for number, each in error.value.failures.items()}
    assert kinds == {1: WorkerDiedError, 2: CorpusError}


def test_a_node_says_why_it_does_not_see_the_store() -> None:
    def refuse(name: str) -> None:
        raise CorpusError("no credentials")

    for read, why in ((refuse, "no credentials"), (lambda name: None, ""), (str.encode, None)):
        place: Any = SimpleNamespace(shared=SimpleNamespace(read=read), marker="marker of a test")
        assert ray_tasks._why_not_seen(place) == why
