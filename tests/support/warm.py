"""Start Python processes by forking a server that has torch and this project loaded.

A command like `distil pretrain` spends seconds on imports before it does a tiny test's work.
`python()` returns the path of a program that is used like the interpreter. It sends its
arguments, environment, working directory and open files to the server, which forks; it passes
signals on, and ends as the forked process ends. If it is killed, so is that process.

The program replaces itself with the real interpreter where a fork would differ from a new process
in what a test may set: other options than -u, variables that libraries read at import, limits,
user, cores, ignored signals, and outside Linux. A fork has all modules of this project loaded, and
one seed of str's hash for all. A test of these, of a terminal or of kills starts real processes
itself, and `test_commands_run_in_new_processes` starts commands so.
"""

import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from typing import Any

from support.warm_client import HERE, state

ENVIRONMENT = dict(os.environ)  # of the server; a test may change its own
_program: list[str] = []


def python() -> str:
    """Return the path of the program that is used like the interpreter."""
    if sys.platform != "linux" or find_spec("torch") is None:
        return sys.executable
    session = os.environ["DISTIL_TEST_SESSION"]
    if os.statvfs(session).f_flag & os.ST_NOEXEC:
        return sys.executable
    if not _program:
        folder = tempfile.mkdtemp(prefix="warm-", dir=session)
        with open(f"{folder}/client.py", "w") as file:
            file.write(f"import sys\nsys.path.insert(0, {HERE!r})\n")
            file.write(f"import warm_client\nwarm_client.client({folder!r}, {sys.executable!r})\n")
        words = shlex.join([sys.executable, "-IS", f"{folder}/client.py"])
        with open(f"{folder}/python", "w") as file:
            file.write(f'#!/bin/sh\nexec {words} "$@"\n')
        os.chmod(f"{folder}/python", 0o755)
        given = {"owner": os.getpid(), "environment": ENVIRONMENT, "state": state(ENVIRONMENT)}
        with open(f"{folder}/server.json", "w") as file:
            json.dump(given, file)
        _program.append(f"{folder}/python")
    return _program[0]


class Process(subprocess.Popen[Any]):
    """Run the program with arguments; signals reach the forked process itself."""

    def __init__(self, *arguments: object, **options: Any) -> None:
        options = {"start_new_session": True, **options}
        super().__init__([python(), *map(str, arguments)], **options)

    @property
    def real(self) -> int:
        """Return the pid of the forked process; of the program's if it replaced itself."""
        if python() == sys.executable:
            return self.pid
        name = f"{os.path.dirname(python())}/pid-{self.pid}"
        while self.poll() is None:
            with contextlib.suppress(OSError), open(name) as file:
                if line := file.read():
                    return int(line)
            with contextlib.suppress(OSError), open(f"/proc/{self.pid}/cmdline", "rb") as file:
                words = file.read().split(b"\0")
                if words[1:2] not in ([b"-IS"], [os.fsencode(python())]) and words != [b""]:
                    return self.pid
            time.sleep(0.002)
        return self.pid

    def send_signal(self, number: int) -> None:
        """Send it; a program ends after its forked process, and not before it."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.real, number)


def forked_for(pid: int) -> int:
    """Return the pid of the process that was forked for a program, or its own if none was."""
    try:
        with open(f"{os.path.dirname(_program[0])}/pid-{pid}") as file:
            return int(file.read())
    except (OSError, ValueError, IndexError):
        return pid


def cpu_seconds() -> float:
    """Return the CPU time of all forked processes that have ended."""
    try:
        with open(f"{os.path.dirname(_program[0])}/usage") as file:
            return float(file.read())
    except (OSError, IndexError):
        return 0.0
