"""Run commands in processes of their own, and check how commands end."""

import fcntl
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from support import warm

ROOT = Path(__file__).parents[2]
DISTIL = f'#!/bin/bash\nexec {sys.executable} -m launch "$@"\n'  # a script for `programs`


def finished(
    *command: object, environment: dict[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with these changes to the environment."""
    options = {"timeout": 600, "env": os.environ | (environment or {}), **options}
    argv = [str(word) for word in command]
    return subprocess.run(argv, capture_output=True, text=True, check=False, **options)


def python(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run this interpreter to its end; see `finished`."""
    return finished(sys.executable, *arguments, **options)


def in_a_process(
    *arguments: object, prefix: Sequence[str] = (), new: bool = False, **options: Any
) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of `distil`, run by the command in `prefix`.

    The process is forked, see `support.warm`, unless it must be `new`.
    """
    program = sys.executable if new else warm.python()
    done = finished(*prefix, program, "-m", "launch", *arguments, **options)
    return done.returncode, done.stdout, done.stderr


def file_size_limit(kib: int) -> list[str]:
    """Return a prefix of a command which keeps its files below a size."""
    return ["bash", "-c", f'ulimit -f {kib}; exec "$@"', "-"]


def wait_until(
    done: Callable[[], object],
    state: Callable[[], object],
    limit: float = 600,
    alive: Callable[[], bool] = lambda: True,
) -> None:
    """Wait until `done`; fail with the state after `limit` seconds, or if nothing is `alive`."""
    end = time.monotonic() + limit
    while not done():
        assert time.monotonic() < end and alive(), state()
        time.sleep(0.02)


def unused_port() -> int:
    """Return a port at which nothing listens and that no other test of this session gets.

    It is below those that the system gives to outgoing connections.
    """
    with (Path(os.environ["DISTIL_TEST_SESSION"]) / "ports").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        while True:
            port = 12_000 + (os.stat(file.name).st_size + 37 * os.getppid()) % 18_000
            file.write("x")
            file.flush()
            with suppress(OSError), socket.socket() as free:
                free.bind(("127.0.0.1", port))
                return port


def outside_slurm() -> dict[str, str]:
    """Return the environment without variables of Slurm."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}


def programs(folder: Path, **scripts: str) -> str:
    """Write scripts to a folder; return a PATH on which they come first."""
    folder.mkdir(exist_ok=True)
    for name, script in scripts.items():
        (folder / name).write_text(script, encoding="utf-8")
        (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def assert_refused(ended: tuple[int, str, str], *parts: str) -> None:
    """Assert exit code 2 and one line of error that holds all parts."""
    code, out, err = ended
    assert code == 2, out + err
    (line,) = err.strip().splitlines()
    assert line.startswith("error: "), err
    for part in parts:
        assert part in line
