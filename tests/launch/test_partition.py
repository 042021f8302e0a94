"""Cut the link of two nodes, and let the same commands continue."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.nodes import LIMIT, LONG, Nodes, history, screens, two_nodes, whole_checkpoints
from support.processes import in_a_process
from support.small_corpora import write

STEPS, SAVE = 120, 20


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with two_nodes() as made:
        yield made


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, run_values: dict[str, Any]) -> Path:
    """Write the config of a longer run than the common one, with checkpoints."""
    train = run_values["train"] | {"max_steps": STEPS}
    values = {"output": "unused", **run_values, "train": train}
    values["checkpoint"] = {"every": SAVE, "keep": 3}
    return write(tmp_path_factory.mktemp("partition") / "run.yaml", values)


@pytest.fixture(scope="module")
def undisturbed(config: Path) -> Path:
    """Return the output of an undisturbed run on two nodes."""
    output = config.parent / "undisturbed"
    with two_nodes() as nodes:
        nodes.launch(config, output)
        assert nodes.end(LONG, output) == [0, 0], screens(output)
    return output


@pytest.mark.slow
def test_two_nodes_train_like_two_processes_of_one_host(config: Path, undisturbed: Path) -> None:
    output = config.parent / "one-host"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}

    def train(rank: str) -> tuple[int, str, str]:
        here = {**place, "RANK": rank, "LOCAL_RANK": rank, "GLOO_SOCKET_IFNAME": "lo"}
        options = ("pretrain", config, f"output={output}")
        return in_a_process(*options, environment=here, timeout=LONG)

    with ThreadPoolExecutor() as pool:
        ended = list(pool.map(train, ("0", "1")))
    assert [code for code, *_ in ended] == [0, 0], ended
    assert [entry["step"] for entry in history(output)] == [0, *range(1, STEPS + 1), STEPS]
    assert_same_end(undisturbed, output)  # tokens of all rows among them


@pytest.mark.slow
def test_a_network_outage_ends_both_nodes_and_the_same_commands_continue(
    nodes: Nodes, config: Path, undisturbed: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    with nodes.holders(output) as holders:
        nodes.launch(config, output, "--max-restarts", "0")
        nodes.until(STEPS // 4, output)
        nodes.far.pull()
        pulled = time.monotonic()
        assert nodes.end(LIMIT, output) == [1, 1], screens(output)
        print(f"both sides were down {time.monotonic() - pulled:.1f} s after the link")
        reached = history(output)[-1]["step"]
        assert reached < STEPS
        newest = max(whole_checkpoints(output))
        assert reached - reached % SAVE - SAVE <= newest <= reached

        nodes.far.plug()
        nodes.launch(config, output, "--max-restarts", "0")
        assert nodes.end(LONG, output) == [0, 0], screens(output)
    assert f"continuing after step {newest}" in screens(output)
    assert holders == {(), (nodes.near.name,)}
    assert_same_end(output, undisturbed)


@pytest.mark.slow
def test_a_network_outage_of_two_seconds_changes_nothing(
    nodes: Nodes, config: Path, undisturbed: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    with nodes.holders(output) as holders:
        nodes.launch(config, output)
        nodes.until(STEPS // 4, output)
        nodes.near.pull()
        before = history(output)[-1]["step"]
        assert before < STEPS
        time.sleep(2)
        assert history(output)[-1]["step"] < before + 10  # it was out
        nodes.near.plug()
        assert nodes.end(LONG, output) == [0, 0], screens(output)
    print(f"restarts after two seconds: {screens(output).count('restart 1 of')}")
    assert holders == {(), (nodes.near.name,)}
    assert_same_end(output, undisturbed)


def assert_same_end(output: Path, undisturbed: Path) -> None:
    """Assert that weights, optimizer and history of two runs are identical bit for bit."""
    assert history(output) == history(undisturbed)
    assert max(whole_checkpoints(output)) == STEPS
    for name in ("student/model.safetensors", "optimizer.safetensors"):
        path = Path(f"checkpoints/step-{STEPS:08d}", name)
        assert (output / path).read_bytes() == (undisturbed / path).read_bytes()
