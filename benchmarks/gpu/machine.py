"""What the figures were measured on, what it can do at most, and what the host costs it."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.supervise import Answer
from pretrain.bench import environment
from pretrain.bench.measure import OurStep, timed
from pretrain.bench.sizes import Sizes
from pretrain.bench.subjects import batch, ids, masking
from pretrain.data.batch import MicroBatch


def machine(device: torch.device) -> dict[str, Any]:
    """The GPU with its driver, the host, the versions, the commit."""
    found = environment.hardware(device)
    if device.type == "cuda":
        found["driver"] = _driver()
    return {
        "commit": os.environ.get("COMMIT") or environment.commit() or "unknown",
        "hardware": found,
        "versions": environment.versions(),
    }


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return result.stdout.strip().splitlines()[0] if result.stdout.strip() else "unknown"


def ceilings(sizes: Sizes, device: torch.device) -> Iterator[Answer]:
    """What a large matrix product of random numbers reaches, and a large copy on the device."""
    n = sizes.matmul
    a, b = (torch.randn(n, n, device=device).bfloat16() for _ in range(2))
    yield Answer("ceiling/bf16 product", 2 * n**3 / _seconds(lambda: a @ b, device) / 1e12)
    source = torch.randint(0, 127, (sizes.copied,), device=device, dtype=torch.int8)
    target = torch.empty_like(source)
    seconds = _seconds(lambda: target.copy_(source), device)
    yield Answer("ceiling/copy", 2 * sizes.copied / seconds / 1e9, "read and written")


def copies(sizes: Sizes, device: torch.device) -> Iterator[Answer]:
    """How long a micro-batch takes to the device: the host's time, which is what delays a step."""
    host = batch(sizes, sizes.rows)
    host.to(device)
    took = []
    for _ in range(sizes.repeats):
        begin = time.perf_counter()
        host.to(device)
        took.append(time.perf_counter() - begin)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    yield Answer("loader/copy", 1000 * median(took), "the host's time, pinning included")


def masking_speed(sizes: Sizes, device: torch.device) -> Iterator[Answer]:
    """Masking a micro-batch with numpy on the host, and with torch on the device."""
    rows, numbers = ids(sizes, sizes.rows), np.arange(sizes.rows)
    inputs = (rows, np.zeros_like(numbers), numbers)
    there = [torch.from_numpy(array).to(device) for array in inputs]
    mask = masking(sizes)
    tasks: dict[str, Callable[[], object]] = {
        "host": lambda: mask(*inputs),
        "device": lambda: mask(*there),
    }
    for name, task in tasks.items():
        seconds = _seconds(task, device)
        yield Answer(f"loader/masking on {name}", rows.size / seconds / 1e6)


def syncs(step: OurStep, host: MicroBatch, name: str) -> Answer:
    """Whether a micro-step, with its rows' way to the device, ever waits for the device."""
    device = step.module.student.device
    for _ in range(2):  # compilation, tuning and the first allocations may wait
        step.batch = host.to(device)
        step()
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.batch = host.to(device)
        step()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return Answer(name, 1, str(error).splitlines()[0])
    finally:
        torch.cuda.set_sync_debug_mode(before)
        step.student.zero_grad(set_to_none=True)
    return Answer(name, 0)


def _seconds(work: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    for _ in range(3):
        work()
    return median(timed(work, device) for _ in range(repeats)) / 1000
