"""Describe and measure the machine: hardware and versions, but no host and no path; its peak."""

from __future__ import annotations

import math
import os
import platform
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrain.device.precision import PRECISIONS
from pretrain.kernels.cpu_layers import have_product, product

_SIZES = {"cpu": 1024}  # width of matrices whose product shows a processor's peak
_PACKAGES = ("torch", "transformers", "accelerate", "triton", "numpy")


def hardware(device: torch.device) -> dict[str, Any]:
    """Return the processor, and the GPU if it computes."""
    processor = platform.processor() or platform.machine()
    with suppress(OSError):  # Linux names the model
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        names = [line.partition(":")[2] for line in text.splitlines() if "model name" in line]
        processor = names[0].strip() if names else platform.machine()
    found: dict[str, Any] = {
        "device": device.type,
        "processor": processor,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["gpu"] = properties.name
        found["capability"] = f"{properties.major}.{properties.minor}"
        found["gpu_bytes"] = properties.total_memory
    return found


def versions() -> dict[str, str | None]:
    """Return the versions of Python and of packages; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def commit() -> str | None:
    """Return the commit of this code; None outside a git checkout.

    A `+` follows it if there are changes.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--exclude=*", "--dirty=+"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def line(device: torch.device) -> str:
    """Return processor or GPU, versions and commit in a line."""
    found = hardware(device)
    where = found.get("gpu") or f"{found['processor']}, {found['threads']} thread(s)"
    known = ", ".join(f"{name} {number}" for name, number in versions().items() if number)
    return f"{where}; {known}; commit {commit() or 'unknown'}"


def peak_flops(device: torch.device, precision: str) -> float:
    """Measure the speed of large matrix products of random numbers on the device, in FLOP/s.

    It is the best of several shapes and many tries: no shape is the fastest on every processor, and
    other work on the machine only slows a product.
    """
    dtype = PRECISIONS[precision].dtype
    size = _SIZES.get(device.type, 4096)
    best = 0.0
    for rows, inner in ((size // 4, size), (size, size), (size, 3 * size)):
        a = torch.randn(rows, inner, device=device).to(dtype)
        b = torch.randn(inner, rows, device=device).to(dtype)
        # Time each library that our layers use.
        products: list[Callable[[], Tensor]] = [partial(torch.matmul, a, b)]
        if have_product("forward", a, b):
            products.append(partial(product, a, b.t(), None))
        seconds = math.inf
        for _ in range(5):
            for multiply in products:
                start = time.perf_counter()
                multiply()[0, 0].item()
                seconds = min(seconds, time.perf_counter() - start)
        best = max(best, 2 * rows * rows * inner / seconds)
        if seconds > 0.1:  # a processor that has no products in bf16 would take minutes
            break
    return best
