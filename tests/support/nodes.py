"""Run two nodes in network namespaces of one machine, with a link that can be cut.

They share host name, process ids and files: to the lock of a run, the other node is a process of
the same host.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from threading import Event
from typing import Any
from uuid import uuid4

import pytest
from support.processes import ROOT, wait_until

TIMEOUT = 10  # seconds, of collective operations
LIMIT = TIMEOUT + 60  # seconds, from the end of a connection to the end of both sides
LONG = 180  # seconds: only a deadlock reaches it
CABLE = "cable"  # both of its ends
HEAD = "10.77.0.1"
# The only figures that time may change.
RATES = ("time", "elapsed", "memory", "tokens_per_second", "data_wait", "cpu_seconds")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


class Node:
    """Hold a network namespace and the launcher that runs in it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.name = f"distil-{uuid4().hex[:8]}-{rank}"
        self.process: subprocess.Popen[bytes] | None = None

    def ip(self, *arguments: str) -> str:
        return command("ip", "-n", self.name, *arguments)

    def plug(self) -> None:
        self.ip("link", "set", CABLE, "up")

    def pull(self) -> None:
        self.ip("link", "set", CABLE, "down")

    def pids(self) -> list[int]:
        return [int(pid) for pid in command("ip", "netns", "pids", self.name).split()]

    def launch(self, config: Path, output: Path, *options: str) -> None:
        """Start `distil launch` here; what it says is added to OUTPUT.node-RANK."""
        argv = ["ip", "netns", "exec", self.name, sys.executable, "-m", "launch", "launch"]
        argv += [str(config), f"output={output}", "--nodes", "2", "--node-rank", str(self.rank)]
        argv += ["--head", HEAD, "--gpus", "1", "--timeout", str(TIMEOUT), *options]
        with output.with_suffix(f".node-{self.rank}").open("ab") as screen:
            self.process = subprocess.Popen(
                argv,
                env={**ENVIRONMENT, "GLOO_SOCKET_IFNAME": CABLE},
                stdin=subprocess.DEVNULL,
                stdout=screen,
                stderr=screen,
                start_new_session=True,
            )

    def remove(self) -> None:
        """End all that runs here, and the namespace."""
        with suppress(subprocess.CalledProcessError):  # it was never made
            end = time.monotonic() + LIMIT
            while (pids := self.pids()) and time.monotonic() < end:
                for pid in pids:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.05)
            command("ip", "netns", "delete", self.name)
        if self.process is not None:
            self.process.wait(LIMIT)


class Nodes:
    """Hold both nodes and their common runs."""

    def __init__(self) -> None:
        self.near, self.far = self.both = (Node(0), Node(1))

    @property
    def codes(self) -> list[int | None]:
        """Return the launchers' exit codes; None while one runs."""
        return [node.process.poll() for node in self.both if node.process]

    def launch(self, config: Path, output: Path, *options: str) -> None:
        for node in self.both:
            node.launch(config, output, *options)

    def until(self, step: int, output: Path) -> None:
        """Wait until a run has made so many steps."""
        end = time.monotonic() + LONG
        while not (made := history(output)) or made[-1]["step"] < step:
            assert time.monotonic() < end and self.codes == [None, None], screens(output)
            time.sleep(0.01)

    def end(self, limit: float, output: Path) -> list[int | None]:
        """Return the exit codes; assert that no process is left."""
        wait_until(lambda: None not in self.codes, lambda: screens(output), limit)
        assert [node.pids() for node in self.both] == [[], []]
        return self.codes

    @contextmanager
    def holders(self, output: Path) -> Iterator[set[tuple[str, ...]]]:
        """Record the namespaces of living holders of the run's lock, in a thread."""
        names = {Path("/var/run/netns", node.name).stat().st_ino: node.name for node in self.both}
        seen: set[tuple[str, ...]] = set()
        over = Event()

        def look() -> None:
            while not over.wait(0.02):
                seen.add(tuple(names.get(place, "elsewhere") for place in lock_holders(output)))

        with ThreadPoolExecutor(1) as pool:
            looking = pool.submit(look)
            try:
                yield seen
            finally:
                over.set()
                looking.result()


def command(*argv: str) -> str:
    """Return the output of a command; raise an error with it if the command fails."""
    return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=LIMIT).stdout


@contextmanager
def two_nodes() -> Iterator[Nodes]:
    """Make two namespaces and their link; remove them with all their processes afterwards."""
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the ip command")
    nodes = Nodes()
    near, far = nodes.both
    with ExitStack() as stack:
        for node in nodes.both:
            stack.callback(node.remove)
        try:
            for node in nodes.both:
                command("ip", "netns", "add", node.name)
                node.ip("link", "set", "lo", "up")
            pair = ["add", CABLE, "netns", near.name, "type", "veth", "peer", "name", CABLE]
            command("ip", "link", *pair, "netns", far.name)
            for node, address in ((near, HEAD), (far, "10.77.0.2")):
                node.ip("address", "add", f"{address}/24", "dev", CABLE)
                node.plug()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        yield nodes


def lock_holders(output: Path) -> list[int]:
    """Return the network namespaces (inodes) of living processes that hold the lock of a run."""
    found = []
    for path in output.glob("pretrain.*.lock"):
        record = path.read_bytes()
        if len(record) == 1024:  # not empty yet, and without a mark that it is over
            with suppress(OSError, ValueError):  # gone; caught while it was written
                found.append(os.stat(f"/proc/{json.loads(record)['pid']}/ns/net").st_ino)
    return found


def history(output: Path) -> list[dict[str, Any]]:
    """Return the metrics without values that depend on time."""
    path = output / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    entries: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return [{k: v for k, v in entry.items() if k not in RATES} for entry in entries]


def whole_checkpoints(output: Path) -> list[int]:
    """Return the steps of a run's checkpoints; assert that every file matches its manifest."""
    steps = []
    for folder in (output / "checkpoints").glob("step-*"):
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        for name, entry in manifest["files"].items():
            assert sha256((folder / name).read_bytes()).hexdigest() == entry["sha256"], name
        steps.append(int(folder.name.removeprefix("step-")))
    return steps


def screens(output: Path) -> str:
    """Return the output of both launchers."""
    paths = sorted(output.parent.glob(f"{output.name}.node-*"))
    return "\n".join(f"{path.name}:\n{path.read_text(encoding='utf-8')}" for path in paths)
