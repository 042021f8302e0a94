"""Check that memory which a step frees serves the next one, while runs train and bench measures.

Each count runs in a new process: after an allocation that failed, glibc serves a thread from
another arena, which always returns large blocks to the system.
"""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ranks
from support.runs import start
from support.said import Said

from pretrain.device.memory import freed_memory_kept

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc")


def new_pages() -> int:
    """Return the fewest pages that one of eight rounds of three tensors takes from the system.

    The tensors have 67 MB: 32 pages each where the system uses huge ones, else 16,384.
    """
    counts = []
    for _ in range(8):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        first = torch.ones(1 << 24)
        second = first + 1
        del first
        third = second * 2
        del second, third
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(counts)


def new_pages_when_kept() -> int:
    with freed_memory_kept():
        return new_pages()


def new_pages_of_a_run(values: dict[str, Any]) -> int:
    class Counting(Said):
        found = -1

        def step(self, step: int, total: int, values: Mapping[str, float]) -> None:
            self.found = new_pages()

    counting = Counting()
    start(values, progress=counting)
    assert counting.found >= 0
    return counting.found


def in_a_new_process(count: Callable[..., int], *arguments: Any) -> int:
    with ranks.FORKS.Pool(1) as pool:  # of a server that has allocated little
        return pool.apply_async(count, arguments).get(timeout=600)


def test_freed_memory_is_kept_while_steps_are_timed() -> None:
    assert in_a_new_process(new_pages) >= 3 * 32
    assert in_a_new_process(new_pages_when_kept) < 32


def test_a_run_keeps_freed_memory(
    tmp_path: Path, teacher_folder: Path, run_config: Callable[..., dict[str, Any]]
) -> None:
    values = run_config(tmp_path / "run", teacher_folder, train={"max_steps": 1})
    assert in_a_new_process(new_pages_of_a_run, values) < 32
