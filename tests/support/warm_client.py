"""Stand in for the interpreter: run a command line in a process that `warm_server` forks.

This is a program of its own, which imports little; see `support.warm`.
"""

import array
import json
import os
import signal
import socket
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
SOCKET = "server"  # the file in the folder at which the server listens
# What `launch.cli.main` sets before libraries are imported.
DEFAULTS = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
}
# Variables with these beginnings are read when libraries are imported or the interpreter starts.
READ_AT_START = ("HF_", "HUGGING", "TRANSFORMERS_", "TORCH", "PYT", "OMP_", "GOMP_", "MKL_", "KMP_")
READ_AT_START += ("OPENBLAS", "LD_", "LC_", "LANG", "HOME", "XDG_", "TRITON")
READ_AT_START += ("TOKENIZERS", "NO_COLOR", "FORCE_COLOR", "TERM")
# Read later, or set by an import.
FOLLOWED = ("PYTHONSAFEPATH", "PYTEST_", "PYTORCH_", "TORCHELASTIC_", "TORCH_DISABLE_SHARE")
FOLLOWED += ("TORCH_NCCL_ASYNC", "PYTHON_EXEC")
FOLLOWED += ("KMP_DUPLICATE", "KMP_INIT")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT)


def state(environment: "dict[str, str]") -> "dict[str, object]":
    """Return what a forked process has from its server, and a new one from its parent."""
    import resource

    limits = {name: getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT")}
    variables = {**DEFAULTS, **environment}
    if {*variables.get("PYTHONPATH", "").split(":")} <= {ROOT, f"{ROOT}/tests"}:
        del variables["PYTHONPATH"]
    return {
        "variables": {
            name: value
            for name, value in sorted(variables.items())
            if name.startswith(READ_AT_START) and not name.startswith(FOLLOWED)
        },
        "limits": {name: resource.getrlimit(number) for name, number in limits.items()},
        "user": [os.getuid(), os.getgid(), os.nice(0), sorted(os.sched_getaffinity(0))],
        "ignored": [n for n in SIGNALS if signal.getsignal(n) == signal.SIG_IGN],
        "spaces": [os.readlink(f"/proc/self/ns/{name}") for name in ("net", "mnt", "user")],
    }


def client(folder: str, interpreter: str) -> None:
    """Run this command line in a process that the server forks; end as it ends."""
    argv = sys.argv[1:]
    replaced = [interpreter, *argv]
    plain = argv[1:] if argv[:1] == ["-u"] else argv
    script = len(plain) > 0 and plain[0].endswith(".py") and "site-packages" not in plain[0]
    if not (script or plain[:1] == ["-c"] or plain[:2] == ["-m", "launch"]):
        os.execv(interpreter, replaced)
    with open(f"{folder}/server.json") as file:
        given = json.load(file)
    here = json.loads(json.dumps(state(dict(os.environ))))
    if here != given["state"]:
        os.execv(interpreter, replaced)
    files = [int(name) for name in os.listdir("/proc/self/fd")]
    files = [number for number in files if os.path.exists(f"/proc/self/fd/{number}")]
    server = connected(folder, interpreter, given)
    request = {
        "argv": argv,
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "mask": os.umask(0o22),
        "files": files,
    }
    data = json.dumps(request).encode("utf-8", "surrogateescape")
    sent = array.array("i", files).tobytes()
    server.sendmsg([len(data).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, sent)])
    server.sendall(data)

    def forward(number: int, _: object) -> None:
        server.sendall(bytes([number]))

    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, forward)
    answer = b""
    while len(answer) < 4:
        part = server.recv(4 - len(answer))
        if not part:
            sys.stderr.write("the server of warm processes has ended\n")
            os._exit(70)
        answer += part
    code = int.from_bytes(answer, "big", signed=True)
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def connected(folder: str, interpreter: str, given: "dict[str, object]") -> socket.socket:
    """Return a connection to the server. The first client starts it."""
    import fcntl

    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    here = os.open(folder, os.O_PATH)  # an address has 107 bytes, a folder's path may have more
    with open(f"{folder}/lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(f"{folder}/{SOCKET}"):
            import subprocess

            with open(f"{folder}/log", "w") as log:
                started = subprocess.Popen(
                    [interpreter, f"{HERE}/warm_server.py", folder],
                    env=given["environment"],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    cwd=folder,
                    start_new_session=True,
                )
            started.stdout.read(1)  # until it listens, or ends
        server.connect(f"/proc/self/fd/{here}/{SOCKET}")
    os.close(here)
    return server
