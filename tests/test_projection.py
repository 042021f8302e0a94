"""Compare the estimate of the paper's run with values computed by hand and with the docs."""

import argparse
from pathlib import Path

import pytest

from benchmarks.projection import SYSTEMS, System, all_reduce, predict, table

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"


def test_step_equals_values_computed_by_hand() -> None:
    """Estimate 4,096 rows of 512 tokens at 1 GFLOP a token on two devices of 1 PFLOP/s at 50 %."""
    system = System("two", 2, 1e15, 1e12, 1e9, price=1.0, share=0.3)
    step = predict(system, 0.5, 1e9, parameters=250_000_000)
    assert step.compute == pytest.approx(4096 * 512 * 1e9 / 1e15)
    assert step.all_reduce == pytest.approx(1.0)  # a gigabyte, half of it each way, twice
    assert step.optimizer == pytest.approx(250e6 * 28 / 1e12)
    assert step.seconds == pytest.approx(2.097152 + 1.0 + 0.007)


def test_all_reduce_of_several_nodes_takes_the_network_bandwidth() -> None:
    node = System("node", 8, 1e14, 1e12, 1e11, 1.0, 0.5)
    nodes = System("nodes", 32, 1e14, 1e12, 1e11, 1.0, 0.5, nodes=4, network=1e10)
    assert all_reduce(node, 1e10) == pytest.approx(2 * 7 / 8 * 0.1)
    assert all_reduce(nodes, 1e10) == pytest.approx(2 * 31 / 32 * 1.0)


def test_docs_show_the_table_that_the_script_prints() -> None:
    printed = table(argparse.Namespace(share=None, tokens=4e9, epochs=3.0))
    rows = [line for line in printed.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 2 * len(SYSTEMS)
    page = PAGE.read_text(encoding="utf-8")
    assert [row for row in rows if row not in page] == []
