"""Collect the tests twice, as two workers do: at other times and with other hash seeds."""

import pytest
from support.processes import ROOT, python


def collected(hash_seed: str) -> list[str]:
    """Return the names of all tests, as a new process collects them."""
    options = ("--collect-only", "-m", "", "-p", "no:cacheprovider")
    done = python("-m", "pytest", *options, cwd=ROOT, environment={"PYTHONHASHSEED": hash_seed})
    assert done.returncode == 0, done.stdout
    return [line for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.slow
def test_two_workers_collect_the_same_names() -> None:
    # Importing torch alone takes longer than the second that separates two gzip headers.
    first, second = collected("1"), collected("2")
    assert len(first) > 1000
    assert first == second
