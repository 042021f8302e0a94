"""Time the products of a DistilBERT step by both libraries of a CPU, for the table of choices.

Shapes: N positions, D width in, E width out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.kernels.cpu_layers import product
from pretrain.kernels.products import ONEDNN, Kind

_N, _HEAD_N, _V = 1024, 512, 30522
_LAYER = ((768, 768),) * 4 + ((768, 3072), (3072, 768))  # (D, E) of a layer's products
# How many layers, or heads, of teacher and student a step of 12 -> 6 layers computes.
_TIMES: dict[Kind, int] = {"forward": 18, "input gradient": 6, "weight gradient": 6, "head": 2}


class Timed(NamedTuple):
    """Hold the milliseconds of a step's products of one kind, and their speed in GFLOP/s."""

    milliseconds: float
    speed: float


def time_products(repeats: int) -> dict[Kind, dict[str, Timed]]:
    """Return what both libraries take for each kind, the medians of tries in turn.

    The head's gradients are left out: they are added to a sum, by MKL in any case.
    """
    found: dict[Kind, dict[str, Timed]] = {}
    for kind, times in _TIMES.items():
        seconds: dict[str, float] = {"mkl": 0.0, "onednn": 0.0}
        operations = 0
        rows = _HEAD_N if kind == "head" else _N
        for wide_in, wide_out in ((768, _V),) if kind == "head" else _LAYER:
            operations += 2 * rows * wide_in * wide_out
            calls = _calls(kind, rows, wide_in, wide_out)
            tries: dict[str, list[float]] = {name: [] for name in calls}
            for attempt in range(repeats + 1):
                for name, call in calls.items():
                    start = time.perf_counter()
                    call()
                    if attempt:  # the first one prepares
                        tries[name].append(time.perf_counter() - start)
            for name, values in tries.items():
                seconds[name] += median(values)
        found[kind] = {
            name: Timed(1e3 * times * value, operations / value / 1e9)
            for name, value in seconds.items()
        }
    return found


def totals(found: dict[Kind, dict[str, Timed]]) -> dict[str, float]:
    """Return the milliseconds of a step's products with each choice, by its name."""
    return {
        name: sum(
            both["onednn" if kind in by_onednn else "mkl"].milliseconds
            for kind, both in found.items()
        )
        for name, by_onednn in ONEDNN.items()
    }


def _calls(kind: Kind, rows: int, wide_in: int, wide_out: int) -> dict[str, Callable[[], Tensor]]:
    """Return both libraries' calls as `Linear` and the head make them."""
    x_ND, g_NE = torch.randn(rows, wide_in), torch.randn(rows, wide_out)
    w_ED, b_E = torch.randn(wide_out, wide_in), torch.randn(wide_out)
    if kind == "input gradient":
        return {"mkl": lambda: g_NE @ w_ED, "onednn": lambda: product(g_NE, w_ED.t(), None)}
    if kind == "weight gradient":
        by_onednn = lambda: product(g_NE.t(), x_ND.t(), None)  # noqa: E731
        return {"mkl": lambda: g_NE.t() @ x_ND, "onednn": by_onednn}
    return {"mkl": lambda: F.linear(x_ND, w_ED, b_E), "onednn": lambda: product(x_ND, w_ED, b_E)}
