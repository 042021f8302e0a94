"""Measure what each test costs: time, CPU time of its own and of children, processes, fixtures.

Every session prints its slowest tests. With DISTIL_TEST_COSTS=FILE it also writes all costs there
as JSON lines; `python benchmarks/costs_of_tests.py FILE` makes tables of them by file and by kind.
CPU time is compared on a usual machine's scale: it is divided by the time of a loop of 10^7
additions over that loop's usual 0.6 s.
"""

import json
import multiprocessing.forkserver
import multiprocessing.util
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from support import warm

FOLDER = "DISTIL_TEST_COSTS_FOLDER"
SHOWN = 60  # tests in the table
TOO_DEAR = 5.0  # CPU seconds of a test that is not marked slow, on a usual machine
USUAL_LOOP = 0.6  # seconds of `additions` there
STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"}


def additions() -> float:
    """Return the CPU seconds of 10^7 additions: how fast this machine's cores are now."""
    start = time.process_time()
    total = 0
    for number in range(10**7):
        total += number
    return time.process_time() - start


def forked() -> float:
    """Return the CPU seconds of both servers that fork, and of what they forked and has ended."""
    pid = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    total = warm.cpu_seconds()
    if pid is not None:
        with suppress(psutil.Error):  # it has ended
            total += sum(psutil.Process(warm.forked_for(pid)).cpu_times()[:4])
    return total


class Costs:
    """Count processes through an audit hook, and write a line per test."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / f"costs-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}.jsonl"
        self.started = 0
        self.fixtures: dict[str, float] = {}
        sys.addaudithook(self._count)
        spawn = multiprocessing.util.spawnv_passfds  # start methods spawn and forkserver

        def counted(*arguments: Any) -> Any:
            self.started += 1
            return spawn(*arguments)

        multiprocessing.util.spawnv_passfds = counted

    def _count(self, event: str, _: object) -> None:
        if event in STARTS:
            self.started += 1

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        start = time.perf_counter()
        try:
            return (yield)
        finally:
            seconds = time.perf_counter() - start
            if seconds > 0.05:
                self.fixtures[fixturedef.argname] = round(seconds, 2)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.started, self.fixtures = 0, {}
        wall, before, before_forked = time.perf_counter(), os.times(), forked()
        result = yield
        after = os.times()
        line = {
            "test": item.nodeid,
            "slow": item.get_closest_marker("slow") is not None,
            "wall": round(time.perf_counter() - wall, 2),
            "own": round(after.user + after.system - before.user - before.system, 2),
            "children": round(
                after.children_user
                + after.children_system
                - before.children_user
                - before.children_system
                + forked()
                - before_forked,
                2,
            ),
            "processes": self.started,
            "fixtures": self.fixtures,
            "not run": "not run" in dict(item.user_properties),
        }
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return result


def pytest_configure(config: pytest.Config) -> None:
    """Measure in each worker, or in this process when there are none."""
    if not hasattr(config, "workerinput"):
        os.environ[FOLDER] = tempfile.mkdtemp(dir=os.environ["DISTIL_TEST_SESSION"])
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Costs(Path(os.environ[FOLDER])))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the slowest tests of all workers and the fast ones above the limit; keep the lines."""
    folder, write = Path(os.environ[FOLDER]), terminalreporter.write_line
    files = sorted(folder.glob("costs-*.jsonl"))
    tests = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    if kept := os.environ.get("DISTIL_TEST_COSTS"):
        with open(kept, "wb") as whole:
            for file in files:
                with file.open("rb") as part:
                    shutil.copyfileobj(part, whole)
    for test in tests:
        if test["not run"]:
            write(f"not run, because the time was over: {test['test']}")
    if len(tests) < 2 * SHOWN:
        return
    loop = additions()
    write(f"{SHOWN} slowest tests: seconds, CPU seconds of the test and of its children, processes")
    for test in sorted(tests, key=lambda test: -test["wall"])[:SHOWN]:
        write("{wall:7.1f} {own:7.1f} {children:7.1f} {processes:4d}  {test}".format(**test))
    write(f"a loop of 10^7 additions takes {loop:.2f} s here, {USUAL_LOOP} s on a usual machine")
    for test in tests:
        cpu = (test["own"] + test["children"]) * USUAL_LOOP / loop
        if cpu > TOO_DEAR and not test["slow"]:
            write(f"above {TOO_DEAR} CPU seconds: {test['test']} {cpu:.1f}")
