"""Check locks between real processes: killed, suspended, at once, on another machine."""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.processes import python

from data_prep import CorpusError
from data_prep.disk.locks import (
    RECORD,
    Busy,
    Identity,
    _Contender,
    lock,
    refuse_if_held,
    this_process,
)

FAST: dict[str, Any] = {"patience": 0.5, "beat": 0.05}
SLOW: dict[str, Any] = {"patience": 3.0, "beat": 0.1}

# Takes the lock and says so; then a line of its input is a command.
HOLDER = """
import sys
from dataclasses import replace
from pathlib import Path
from data_prep.disk.locks import lock, this_process

folder, patience, beat, boot = sys.argv[1:]
owner = replace(this_process(), boot=boot or this_process().boot)
with lock(Path(folder), "task", patience=float(patience), beat=float(beat), identity=owner) as held:
    print("held", flush=True)
    for line in sys.stdin:
        try:
            held.check()
            print("fine", flush=True)
        except Exception as error:
            print(type(error).__name__, error, flush=True)
"""


@contextmanager
def holder(folder: Path, timing: dict[str, float], boot: str = "") -> Iterator[Any]:
    """Start a process that holds the lock."""
    times = [str(timing["patience"]), str(timing["beat"])]
    command = [sys.executable, "-c", HOLDER, str(folder), *times, boot]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def elsewhere(**changes: Any) -> Identity:
    """Return the identity of a process of another machine."""
    return replace(this_process(), host="far", boot="another boot", **changes)


def record(owner: Identity, counter: int = 1) -> bytes:
    values = {name: getattr(owner, name) for name in Identity.__slots__}
    text = json.dumps(values | {"token": "f" * 32, "counter": counter})
    return text.encode().ljust(RECORD - 1) + b"\n"


RACER = """
import os, sys, time
from pathlib import Path
from data_prep.disk.locks import Busy, lock

folder = Path(sys.argv[1])
log = os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
print("ready", flush=True)
sys.stdin.readline()
while True:
    try:
        with lock(folder / "locks", "task", patience=5, beat=0.2) as held:
            os.write(log, b"enter %d\\n" % os.getpid())
            time.sleep(0.01)
            held.check()
            os.write(log, b"leave %d\\n" % os.getpid())
        break
    except Busy:
        os.write(log, b"refused %d\\n" % os.getpid())
        time.sleep(0.01)
"""


def test_twenty_processes_at_once_are_never_two_inside(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RACER, str(tmp_path)]
    pipe = subprocess.PIPE
    racers = [subprocess.Popen(command, stdin=pipe, stdout=pipe) for _ in range(20)]
    for racer in racers:
        assert racer.stdout is not None and racer.stdout.readline() == b"ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write(b"go\n")
        racer.stdin.flush()
    for racer in racers:
        racer.communicate()
        assert racer.returncode == 0
    events = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    inside = [event for event in events if event[0] != "refused"]
    assert len(events) > len(inside), "nobody met anybody: the test has shown nothing"
    entered = [pid for event, pid in inside if event == "enter"]
    assert sorted(entered) == sorted(str(racer.pid) for racer in racers)
    expected = [[event, pid] for pid in entered for event in ("enter", "leave")]
    assert inside == expected


def no_wait(left: float, host: str) -> None:
    """Fail the test: a lock must be taken or refused without waiting."""
    pytest.fail(f"waits {left} s for {host}")


def test_a_living_holder_of_this_machine_is_named_at_once(tmp_path: Path) -> None:
    output = Path("shards/x")
    with holder(tmp_path, FAST) as process:
        with pytest.raises(Busy) as caught, lock(tmp_path, "task", output=output, waiting=no_wait):
            pass
        with lock(tmp_path, "another task"):
            pass
    host = os.uname().nodename
    assert str(caught.value) == (
        f"shards/x: another `distil prepare` (host {host}, pid {process.pid}) is at work on task: "
        "wait for it"
    )


def test_a_killed_holder_is_followed_at_once(tmp_path: Path) -> None:
    with holder(tmp_path, FAST) as process:
        process.kill()
        # Not reaped yet: a zombie holds nothing. The patience of a minute is not used.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with lock(tmp_path, "task", waiting=no_wait) as held:
            held.check()
    with lock(tmp_path, "task", waiting=no_wait) as held:
        held.check()


def test_a_reused_pid_does_not_hold_the_lock(tmp_path: Path) -> None:
    me = this_process()
    if not me.start:
        pytest.skip("no /proc: the start of a process is not known")
    (tmp_path / "task.000001.lock").write_bytes(record(replace(me, start="1")))
    with lock(tmp_path, "task") as held:
        held.check()
    (tmp_path / "other.000001.lock").write_bytes(record(me))
    with pytest.raises(Busy, match=f"pid {os.getpid()}"), lock(tmp_path, "other"):
        pass


def test_a_far_holder_whose_counter_moves_is_busy(tmp_path: Path) -> None:
    path = tmp_path / "task.000001.lock"
    far = elsewhere(pid=4_000_000)  # no process here
    path.write_bytes(record(far))
    stop = threading.Event()

    def beat() -> None:
        counter = 1
        while not stop.wait(0.1):
            counter += 1
            with path.open("r+b", buffering=0) as file:
                file.write(record(far, counter))

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(Busy, match=r"host far, pid 4000000\) is at work on task: wait for it"):  # noqa: SIM117
            with lock(tmp_path, "task", patience=60):
                pass
    finally:
        stop.set()
        thread.join()
    assert not (tmp_path / "task.000002.lock").exists()


CONTENTS = {
    "far and dead": record(elsewhere(pid=1)),
    "empty": b"",
    "torn": record(elsewhere(pid=1))[:40],
    "garbage": b"\xff\x00[1, 2" * 20,
    "other json": b"[]",
    "no pid": record(elsewhere(pid=True)),
    "own group as pid": record(replace(this_process(), pid=0)),
    "nested": b"[" * 100_000,
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS.keys())
def test_a_lock_with_an_unchanged_counter_is_taken_over(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "task.000001.lock").write_bytes(content[:RECORD])
    told: list[tuple[float, str]] = []
    with lock(tmp_path, "task", waiting=lambda *news: told.append(news), **FAST) as held:
        held.check()
        assert (tmp_path / "task.000002.lock").exists()
    seconds = [left for left, _ in told]
    assert seconds[0] == FAST["patience"] and seconds[-1] > 0
    assert seconds == sorted(seconds, reverse=True) and len(seconds) >= 2
    assert {host for _, host in told} == {
        "far" if content == CONTENTS["far and dead"] else "unknown"
    }


def test_a_suspended_holder_learns_that_it_was_followed(tmp_path: Path) -> None:
    with holder(tmp_path, FAST, boot="another boot") as process:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        with lock(tmp_path, "task", **FAST) as held:
            process.send_signal(signal.SIGCONT)
            process.stdin.write("check\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            assert answer.startswith("Busy ") and f"pid {os.getpid()}) took over" in answer
            time.sleep(4 * FAST["beat"])  # its heartbeat and its end disturb nobody
            process.stdin.close()
            process.wait()
            held.check()
            with pytest.raises(Busy), lock(tmp_path, "task"):
                pass
        before = (tmp_path / "task.000001.lock").read_bytes()
        assert len(before) > RECORD


def test_one_of_two_processes_takes_over_from_a_dead_host(tmp_path: Path) -> None:
    (tmp_path / "task.000001.lock").write_bytes(record(elsewhere(pid=1)))
    done = threading.Barrier(2, timeout=120)

    def contend(number: int) -> str:
        try:
            with lock(tmp_path, "task", **FAST) as held:
                done.wait()
                held.check()
                return "held"
        except Busy:
            done.wait()
            return "busy"

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(contend, range(2))) == ["busy", "held"]
    assert not (tmp_path / "task.000003.lock").exists()


def test_a_creator_that_stood_still_before_its_first_beat_gives_way(tmp_path: Path) -> None:
    # It made generation 1, stood still while 2 took over, and writes only then.
    from data_prep.disk.locks import Lock

    first, second = tmp_path / "task.000001.lock", tmp_path / "task.000002.lock"
    first.touch()
    with lock(tmp_path, "task", **FAST) as held:
        assert second.exists()
        late = Lock(first, second, this_process(), "out: task", "distil prepare")
        with pytest.raises(CorpusError, match="took over"):
            late.check()
        held.check()
        with pytest.raises(Busy), lock(tmp_path, "task"):
            pass


def test_an_end_mark_or_a_next_generation_ends_a_lock(tmp_path: Path) -> None:
    # A cached folder may hide the successor; the successor may die before it marks the file.
    with lock(tmp_path, "marked") as held:
        with (tmp_path / "marked.000001.lock").open("ab") as file:
            file.write(b"over\n")
        with pytest.raises(CorpusError, match="took over"):
            held.check()
    with lock(tmp_path, "followed") as held:
        (tmp_path / "followed.000002.lock").touch()
        for _ in range(2):
            with pytest.raises(CorpusError, match="took over"):
                held.check()
    assert len((tmp_path / "followed.000001.lock").read_bytes()) == RECORD


def test_threads_that_compete_for_each_generation_never_hold_it_together(tmp_path: Path) -> None:
    rounds, contenders = 20, 8
    meet = threading.Barrier(contenders, timeout=120)
    inside = [0] * rounds
    overlaps: list[int] = []

    def contend(number: int) -> None:
        for turn in range(rounds):
            meet.wait()
            try:
                with lock(tmp_path, f"task{turn}", **FAST):
                    inside[turn] += 1
                    if inside[turn] > 1:
                        overlaps.append(turn)
                    meet.wait()
            except Busy:
                meet.wait()

    with ThreadPoolExecutor(contenders) as pool:
        list(pool.map(contend, range(contenders)))  # raises what a thread has raised
    assert inside == [1] * rounds and not overlaps


def test_a_call_that_holds_the_interpreter_does_not_lose_the_lock(tmp_path: Path) -> None:
    sleep = ctypes.PyDLL(None).usleep  # unlike CDLL, keeps the GIL
    with (
        lock(tmp_path, "task", identity=elsewhere(pid=7), **SLOW) as held,
        subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(tmp_path), "3.0", "0.1", ""],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as contender,
    ):
        for _ in range(3):
            sleep(900_000)
        output, errors = contender.communicate()
        held.check()
    assert output == b"" and b"Busy" in errors and b"host far, pid 7" in errors


def test_the_heartbeat_does_not_keep_a_process_alive(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from data_prep.disk.locks import lock\n"
        "held = lock(Path(sys.argv[1]), 'task'); held.__enter__(); sys.exit(3)"
    )
    assert python("-c", code, tmp_path).returncode == 3
    with lock(tmp_path, "task") as held:
        held.check()


def test_released_by_an_error_too_and_numbers_are_never_used_twice(tmp_path: Path) -> None:
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), lock(tmp_path / "new" / "locks", "task"):
            raise ZeroDivisionError
    names = sorted(path.name for path in (tmp_path / "new" / "locks").iterdir())
    assert names == [f"task.{number:06d}.lock" for number in (1, 2, 3)]


def test_lock_files_are_bounded_and_numbers_still_rise(tmp_path: Path) -> None:
    for _ in range(30):
        with lock(tmp_path, "task"), lock(tmp_path, "task.2"):
            pass
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names[-1] == "task.2.000030.lock" and "task.000030.lock" in names
    assert len(names) == 2 * 9


@pytest.mark.parametrize("anew", [False, True], ids=["removed numbers", "removed folder"])
def test_a_contender_that_stands_still_while_its_number_is_removed_gets_nothing(
    anew: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It has seen that generation 1 is over, and creates number 2 when that was long removed.
    with lock(tmp_path / "locks", "task"):
        pass
    is_over = _Contender._is_over
    with ExitStack() as stack:

        def stand_still(contender: _Contender, generation: int) -> bool:
            over = is_over(contender, generation)
            monkeypatch.setattr(_Contender, "_is_over", is_over)
            if anew:
                shutil.rmtree(tmp_path / "locks")
            for _ in range(0 if anew else 30):
                with lock(tmp_path / "locks", "task"):
                    pass
            stack.enter_context(lock(tmp_path / "locks", "task"))
            return over

        monkeypatch.setattr(_Contender, "_is_over", stand_still)
        with pytest.raises(Busy, match=f"pid {os.getpid()}"), lock(tmp_path / "locks", "task"):
            pass
        left = {path.name for path in (tmp_path / "locks").iterdir()}
        assert "task.000002.lock" not in left


def test_a_living_holder_is_found_without_taking_the_lock(tmp_path: Path) -> None:
    for name in ("nothing", "over"):
        refuse_if_held(tmp_path, name)
        with lock(tmp_path, name), pytest.raises(Busy, match=f"pid {os.getpid()}"):
            refuse_if_held(tmp_path, name)
        refuse_if_held(tmp_path, name)
    (tmp_path / "far.000001.lock").write_bytes(record(elsewhere(pid=1)))
    refuse_if_held(tmp_path, "far")  # whether it is alive takes a minute to see


@pytest.mark.parametrize("anew", [False, True])
def test_a_removed_folder_ends_the_lock(tmp_path: Path, anew: bool) -> None:
    folder = tmp_path / "locks"
    path = folder / "task.000001.lock"
    with lock(folder, "task") as held:
        path.unlink()
        folder.rmdir()
        if not anew:
            with pytest.raises(CorpusError, match=r"its lock file .* is gone"):
                held.check()
            return
        with lock(folder, "task") as other:  # the first of new files, with the same name
            with pytest.raises(CorpusError, match="took over"):
                held.check()
            other.check()
        assert len(path.read_bytes()) > RECORD
