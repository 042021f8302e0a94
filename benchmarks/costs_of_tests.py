"""Print what tests cost by file and by kind, from the lines of DISTIL_TEST_COSTS=FILE.

    DISTIL_TEST_COSTS=costs.jsonl make test
    python benchmarks/costs_of_tests.py costs.jsonl

A kind is what takes a test's time: its own CPU time, that of processes that it starts, fixtures, or
waiting.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from typing import Any

COLUMNS = ("tests", "wall", "own", "children", "processes")


def kind_of(test: dict[str, Any]) -> str:
    """Return what most of a test's time is."""
    busy = test["own"] + test["children"]
    if test["wall"] < 1:
        return "below 1 s"
    if sum(test["fixtures"].values()) > test["wall"] / 2:
        return "fixtures"
    if busy < test["wall"] / 2:
        return "waiting"
    return "children" if test["children"] > test["own"] else "own"


def table(tests: list[dict[str, Any]], key: Any) -> None:
    """Print a line for each value of `key`, the dearest first."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(COLUMNS))
    for test in tests:
        for i, name in enumerate(COLUMNS):
            sums[key(test)][i] += test.get(name, 1)
    print(*(f"{name:>9}" for name in COLUMNS))
    for name, values in sorted(sums.items(), key=lambda item: -item[1][2] - item[1][3]):
        print(*(f"{value:9.0f}" for value in values), "", name)
    print()


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as lines:
        found = [json.loads(line) for line in lines]
    table(found, lambda test: "all")
    table(found, kind_of)
    table(found, lambda test: test["test"].partition("::")[0])
