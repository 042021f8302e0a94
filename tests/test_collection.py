"""Collect the tests twice, as two workers do: at other times and with other hash seeds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def collected(hash_seed: str) -> list[str]:
    """Return the names of all tests, as a new process collects them."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-m", "", "-p", "no:cacheprovider"],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    return [line for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.slow
def test_two_workers_collect_the_same_names() -> None:
    # Importing torch alone takes longer than the second that separates two gzip headers.
    first, second = collected("1"), collected("2")
    assert len(first) > 1000
    assert first == second
