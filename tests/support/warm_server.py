"""Fork a process with torch and this project loaded for each client; see `support.warm`."""

import array
import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import pkgutil
import random
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import threading
import traceback
import types
from typing import Any

from warm_client import DEFAULTS, HERE, ROOT, SOCKET


def preload() -> None:
    """Import this project and what its commands import when they run, but start no thread."""
    sys.path[0] = ROOT  # instead of this script's folder
    os.environ.update({name: os.environ.get(name, value) for name, value in DEFAULTS.items()})
    for name in ("torch.distributed.run", "accelerate", "torch._dynamo", "torch.utils.data"):
        importlib.import_module(name)
    for family in ("bert", "distilbert", "roberta", "modernbert", "auto"):
        importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    for package in ("launch", "pretrain", "data_prep"):
        folder = importlib.import_module(package).__path__
        for module in pkgutil.walk_packages(folder, f"{package}."):
            if module.name.endswith(("__main__", "torchrun.entry", "torchrun.rank")):
                continue
            with contextlib.suppress(ImportError):  # it needs a package that is not installed
                importlib.import_module(module.name)
    runpy.run_path(f"{HERE}/preloaded.py")


class Server:
    """Fork a process for each client, pass signals to it, and tell the client how it ended."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.ready = selectors.DefaultSelector()
        self.children: dict[int, tuple[int, socket.socket]] = {}  # pid -> pidfd, connection
        self.usage = 0.0
        self.listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        here = os.open(folder, os.O_PATH)
        self.listening.bind(f"/proc/self/fd/{here}/{SOCKET}.new")
        os.close(here)
        self.listening.listen(64)
        os.rename(f"{folder}/{SOCKET}.new", f"{folder}/{SOCKET}")
        self.ready.register(self.listening, selectors.EVENT_READ, ("accept", 0))
        with open(f"{folder}/server.json") as file:
            owner = os.pidfd_open(json.load(file)["owner"])
        self.ready.register(owner, selectors.EVENT_READ, ("owner", 0))

    def serve(self) -> dict[str, Any]:
        """Serve until the owner ends; in a forked process return what it must run."""
        while True:
            for key, _ in self.ready.select():
                kind, pid = key.data
                if pid and pid not in self.children:
                    continue  # reaped in this round
                if kind == "owner":
                    for child in self.children:
                        kill(child, signal.SIGKILL)
                    os._exit(0)
                elif kind == "accept":
                    connection, _ = self.listening.accept()
                    request = self.fork(connection)
                    if request is not None:
                        return request
                elif kind == "ended":
                    self.tell(pid)
                else:
                    self.pass_on(pid)

    def fork(self, connection: socket.socket) -> dict[str, Any] | None:
        request, files = receive(connection)
        if request is None:
            connection.close()
            return None
        pid = os.fork()
        if pid == 0:
            place(files, request["files"])
            return request
        for number in files:
            os.close(number)
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        with open(f"{self.folder}/pid-{int.from_bytes(peer[:4], sys.byteorder)}", "w") as file:
            file.write(f"{pid}\n")
        pidfd = os.pidfd_open(pid)
        self.children[pid] = (pidfd, connection)
        self.ready.register(pidfd, selectors.EVENT_READ, ("ended", pid))
        self.ready.register(connection, selectors.EVENT_READ, ("signal", pid))
        return None

    def tell(self, pid: int) -> None:
        _, status, usage = os.wait4(pid, 0)
        self.usage += usage.ru_utime + usage.ru_stime
        with open(f"{self.folder}/usage", "w") as file:
            file.write(f"{self.usage:.3f}")
        code = os.waitstatus_to_exitcode(status)
        pidfd, connection = self.children.pop(pid)
        self.ready.unregister(pidfd)
        os.close(pidfd)
        if connection.fileno() >= 0:
            self.ready.unregister(connection)
            with contextlib.suppress(OSError):  # the client was killed
                connection.sendall(code.to_bytes(4, "big", signed=True))
            connection.close()

    def pass_on(self, pid: int) -> None:
        connection = self.children[pid][1]
        try:
            numbers = connection.recv(64)
        except OSError:
            numbers = b""
        if not numbers:  # the client was killed
            self.ready.unregister(connection)
            connection.close()
            kill(pid, signal.SIGKILL)
        for number in numbers:
            os.kill(pid, number)


def kill(pid: int, number: int) -> None:
    """Send a signal to a forked process and to those of its group, if it is there."""
    for send in (os.kill, os.killpg):
        with contextlib.suppress(OSError):
            send(pid, number)


def receive(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Return a client's request, and its files as numbers of this process."""
    head, control, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(4 * 250))
    files = array.array("i")
    for level, kind, data in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            files.frombytes(data[: len(data) - len(data) % files.itemsize])
    size, data = int.from_bytes(head, "big"), b""
    while len(head) == 8 and len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            break
        data += part
    if not data or len(data) < size:
        for number in files:
            os.close(number)
        return None, []
    return json.loads(data.decode("utf-8", "surrogateescape")), [*files]


def place(files: list[int], numbers: list[int]) -> None:
    """Give files the numbers that they have in the client, and close all others."""
    above = max([*numbers, *files, 2]) + 1
    moved = [fcntl.fcntl(number, fcntl.F_DUPFD, above) for number in files]
    os.closerange(0, above)
    for number, target in zip(moved, numbers, strict=True):
        os.dup2(number, target, inheritable=True)
    os.closerange(above, max(moved, default=above) + 64)


def run(request: dict[str, Any], program: str) -> int:
    """Run a command line as the interpreter would; return the exit code."""
    os.setsid()
    random.seed()
    for library in ("numpy.random", "torch"):
        sys.modules[library].seed()
    tempfile.tempdir = None
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    os.umask(request["mask"])
    argv = list(request["argv"])
    unbuffered = argv[0] == "-u"
    argv = argv[unbuffered:]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        file = None
        with contextlib.suppress(OSError):  # closed, as after `>&-`
            errors = "backslashreplace" if number == 2 else None
            options = {"encoding": "utf-8", "errors": errors, "closefd": False}
            file = open(number, "w" if number else "r", **options)  # noqa: SIM115
            file.reconfigure(line_buffering=number == 2 or file.isatty(), write_through=unbuffered)
        setattr(sys, name, file)
        setattr(sys, f"__{name}__", file)
    sys.executable, sys.orig_argv = program, [program, *request["argv"]]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    safe = "PYTHONSAFEPATH" in os.environ
    sys.path[:1] = [part for part in os.environ.get("PYTHONPATH", "").split(":") if part]
    code: object = 0
    try:
        if argv[0] == "-m":
            sys.argv = ["-m", *argv[2:]]
            sys.path[:0] = [] if safe else [os.getcwd()]
            runpy._run_module_as_main(argv[1], alter_argv=True)
        elif argv[0] == "-c":
            sys.argv = ["-c", *argv[2:]]
            sys.path[:0] = [] if safe else [""]
            exec(compile(argv[1], "<string>", "exec"), main.__dict__)
        else:
            sys.argv = argv
            sys.path[:0] = [] if safe else [os.path.dirname(os.path.abspath(argv[0]))]
            main.__file__ = argv[0]
            with open(argv[0], "rb") as file:
                exec(compile(file.read(), argv[0], "exec"), main.__dict__)
    except SystemExit as stop:
        code = stop.code
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        code = 1
    if code is not None and not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    return code or 0


def end(code: int) -> None:
    """End as the interpreter does: join threads, run what is registered, flush."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            try:
                file.flush()
            except OSError:
                code = 120
    os._exit(code & 0xFF)


def serve(folder: str) -> None:
    """Preload, say so on standard output, and serve."""
    preload()
    gc.collect()
    gc.freeze()
    server = Server(folder)
    os.write(1, b"1")
    request = server.serve()
    end(run(request, f"{folder}/python"))


if __name__ == "__main__":
    serve(sys.argv[1])
