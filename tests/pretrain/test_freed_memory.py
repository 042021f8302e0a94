"""Check that memory which a step frees serves the next one, while runs train and bench measures."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import start
from support.said import Said

from pretrain.device.memory import freed_memory_kept

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc")


def new_pages() -> int:
    """Return how many pages ten rounds of three tensors of 134 MB take from the system, each."""
    for repeat in range(15):
        if repeat == 5:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        first = torch.ones(1 << 25)
        second = first + 1
        del first
        third = second * 2
        del second, third
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 10


def test_freed_memory_is_kept_while_steps_are_timed() -> None:
    with freed_memory_kept():
        assert new_pages() < 100
    assert new_pages() > 3 * 64  # huge pages are 2 MB


def test_a_run_keeps_freed_memory(
    tmp_path: Path, teacher_folder: Path, run_config: Callable[..., dict[str, Any]]
) -> None:
    class Counting(Said):
        found: int | None = None

        def step(self, step: int, total: int, values: Mapping[str, float]) -> None:
            self.found = new_pages()

    # Other tests of this process may have left another setting.
    if (usual := new_pages()) < 3 * 64:
        pytest.skip("this process keeps freed memory already")
    counting = Counting()
    values = run_config(tmp_path / "run", teacher_folder, train={"max_steps": 1})
    start(values, progress=counting)
    assert counting.found is not None and counting.found < usual / 2
