"""Prepare a corpus on a Ray cluster whose nodes share nothing but an S3 server.

Three nodes in network namespaces of one machine; each has its own temporary files, home and shared
memory. One node and one worker are killed while they work.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from support.processes import ROOT, finished, in_a_process, wait_until

from data_prep.shards import load_manifest

pytest.importorskip("ray", reason="Ray is an extra: pip install '.[ray]'")
pytest.importorskip("moto.server", reason="moto is an S3 server for tests")
RAY = str(Path(sys.executable).with_name("ray"))
# Of this session: another one, or what a killed one has left, may have a bridge, too.
NETWORK = f"10.{random.SystemRandom().randrange(64, 250)}.{random.SystemRandom().randrange(250)}"
STORE = f"{NETWORK}.254"
PORT = 6379
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("nsenter"),
        reason="network and mount namespaces need root, ip and nsenter",
    ),
]


def command(*argv: object) -> str:
    return subprocess.run(
        [str(word) for word in argv], check=True, capture_output=True, text=True
    ).stdout


class Node:
    """Hold namespaces of a network and of mounts, which end with their first process."""

    def __init__(self, number: int, private: Path, bridge: str) -> None:
        self.name = f"{bridge}-{number}"
        self.address = f"{NETWORK}.{number}"
        command("ip", "netns", "add", self.name)
        command(
            "ip", "link", "add", f"{self.name}v", "type", "veth", "peer", "eth", "netns", self.name
        )
        command("ip", "link", "set", f"{self.name}v", "master", bridge, "up")
        for words in (f"addr add {self.address}/24 dev eth", "link set eth up", "link set lo up"):
            command("ip", "-n", self.name, *words.split())
        script = f"mount -t tmpfs tmpfs {private} && mount -t tmpfs tmpfs /dev/shm && "
        script += f"mkdir {private}/tmp && echo ready && exec sleep infinity"
        self.holder = subprocess.Popen(
            ["ip", "netns", "exec", self.name, "unshare", "-m", "bash", "-c", script],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.holder.stdout is not None and self.holder.stdout.readline() == "ready\n"

    @property
    def inside(self) -> list[str]:
        """Return the beginning of a command that runs here."""
        return ["nsenter", "-t", str(self.holder.pid), "-m", "-n"]

    def pids(self, word: str = "") -> list[int]:
        """Return the processes here whose command line has a word, but the first one."""
        found = map(int, command("ip", "netns", "pids", self.name).split())
        mine = [pid for pid in found if pid != self.holder.pid]
        return [pid for pid in mine if word in _command_of(pid)]

    def kill(self) -> None:
        """End all that runs here at once."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def remove(self) -> None:
        self.kill()
        self.holder.kill()
        self.holder.wait()
        command("ip", "netns", "delete", self.name)


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8").replace("\0", " ")
    except OSError:
        return ""


@pytest.fixture
def private() -> Iterator[Path]:
    """Return a folder that each node sees empty; its name is short, as sockets want it."""
    folder = Path("/tmp") / f"dp-{uuid4().hex[:6]}"
    folder.mkdir()
    yield folder
    folder.rmdir()


@pytest.fixture
def nodes(private: Path) -> Iterator[list[Node]]:
    bridge = f"dp{uuid4().hex[:6]}"
    with ExitStack() as stack:
        command("ip", "link", "add", bridge, "type", "bridge")
        stack.callback(command, "ip", "link", "delete", bridge)
        command("ip", "addr", "add", f"{STORE}/24", "dev", bridge)
        command("ip", "link", "set", bridge, "up")
        found = []
        for number in (1, 2, 3):
            found.append(Node(number, private, bridge))
            stack.callback(found[-1].remove)
        yield found


@pytest.fixture
def bucket(nodes: list[Node], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Start an S3 server that the nodes reach; return boto3's bucket."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address=STORE, port=0, verbose=False)
    server.start()
    try:
        _, port = server.get_host_and_port()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{STORE}:{port}")
        for name, value in (
            ("AWS_ACCESS_KEY_ID", "test"),
            ("AWS_SECRET_ACCESS_KEY", "test"),
            ("AWS_DEFAULT_REGION", "us-east-1"),
        ):
            monkeypatch.setenv(name, value)
        found = boto3.resource("s3").Bucket("bucket")
        found.create()
        yield found
    finally:
        server.stop()


def environment(private: Path) -> dict[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        "HOME": str(private),
        "TMPDIR": str(private / "tmp"),
        "PYTHONPATH": str(ROOT),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_ADDRESS": f"{NETWORK}.1:{PORT}",
    }


def start_raylets(nodes: list[Node], private: Path) -> None:
    for node in nodes:
        where = ["--head", f"--port={PORT}", "--include-dashboard=false"]
        if node is not nodes[0]:
            where = [f"--address={NETWORK}.1:{PORT}"]
        options = [f"--node-ip-address={node.address}", "--num-cpus=1", "--disable-usage-stats"]
        options += ["--object-store-memory=80000000", f"--temp-dir={private}/ray"]
        options = options if node is nodes[0] else options[:-1]
        done = finished(
            *node.inside, RAY, "start", *where, *options, env=environment(private), timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr


def write_texts(bucket: Any, num: int) -> int:
    """Write files of a unit each; return the bytes of all."""
    draw, size = random.Random(0), 0
    words = [f"w{i}" for i in range(4000)]
    for number in range(num):
        lines = [" ".join(draw.choices(words, k=60)) for _ in range(11_000)]
        data = "\n".join(lines).encode()
        bucket.put_object(Key=f"texts/{number:02d}.txt", Body=data)
        size += len(data)
    return size


def config(path: Path) -> Path:
    values = {
        "output": "set on the command line",
        "tokenizer": {"train": {"vocab_size": 300}},
        "row_length": 64,
        "sources": [{"kind": "text", "path": "s3://bucket/texts/", "document": "line"}],
        "deduplicate": {"documents": "near"},
    }
    path.write_text(json.dumps(values), encoding="utf-8")
    return path


def test_nodes_that_share_nothing_make_the_same_bytes(
    nodes: list[Node], private: Path, bucket: Any, tmp_path: Path
) -> None:
    texts = write_texts(bucket, 10)
    corpus = config(tmp_path / "corpus.yaml")
    code, out, err = in_a_process("prepare", corpus, f"output={tmp_path}/plain", "workers=2")
    assert code == 0, out + err
    start_raylets(nodes, private)
    argv = [*nodes[0].inside, sys.executable, "-m", "launch", "prepare", str(corpus)]
    argv += ["--engine", "ray", f"output={private}/out"]

    # Without a store a node that does not see the output is named, and nothing is made.
    done = finished(*argv, env=environment(private), cwd="/")
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.strip().splitlines()[-1:]
    assert f"{private}/out/.work: not seen by " in line and ": put it where" in line

    before = _sent(nodes)
    screen = (tmp_path / "screen").open("w+")
    argv += ["work=s3://bucket/work", "--upload", "s3://bucket/shards"]
    process = subprocess.Popen(
        argv, env=environment(private), cwd="/", stdout=screen, stderr=screen
    )
    try:
        alive = lambda: process.poll() is None  # noqa: E731
        said = lambda: (tmp_path / "screen").read_text(encoding="utf-8")  # noqa: E731
        wait_until(lambda: _records(bucket, "extract") >= 2, said, alive=alive)
        nodes[2].kill()  # a node, with its raylet
        wait_until(lambda: nodes[1].pids("ray::"), said, alive=alive)
        os.kill(nodes[1].pids("ray::")[0], signal.SIGKILL)
        assert process.wait(timeout=400) == 0, said()
    finally:
        process.kill()
        process.wait()
        screen.close()
    moved = _sent(nodes) - before
    assert "2 node(s)" in said() or "3 node(s)" in said(), said()
    target = tmp_path / "shards"
    for item in bucket.objects.filter(Prefix="shards/"):
        file = target / item.key.removeprefix("shards/")
        file.parent.mkdir(parents=True, exist_ok=True)
        bucket.download_file(item.key, str(file))
    assert load_manifest(target).digest == load_manifest(tmp_path / "plain").digest
    assert not [item.key for item in bucket.objects.filter(Prefix="work/")]
    print(f"{texts / 1e6:.1f} MB of text, {moved / 1e6:.1f} MB over the nodes' cables")


def _records(bucket: Any, stage: str) -> int:
    keys = [item.key.split("/") for item in bucket.objects.filter(Prefix="work/")]
    return sum(key[2:-1] == [stage] and key[-1].endswith(".json") for key in keys)


def _sent(nodes: list[Node]) -> int:
    """Return the bytes that all nodes have sent and received."""
    total = 0
    for node in nodes:
        place = Path("/sys/class/net") / f"{node.name}v" / "statistics"
        total += sum(int((place / name).read_text()) for name in ("rx_bytes", "tx_bytes"))
    return total
