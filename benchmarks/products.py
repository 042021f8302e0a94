"""Time the products of a DistilBERT step by both libraries of a CPU, for the table of choices.

    python -m benchmarks.products --repeats 9 [--record FILE]

It says which choice of `train.products` is fastest.

Shapes: N positions, D width in, E width out.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.kernels.cpu_layers import product
from pretrain.kernels.products import ONEDNN, Kind, choose, row_of
from pretrain.monitor.records import append_record, check_record, row

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


def main() -> None:
    """Print the table, the fastest choice and its row of the table of choices."""
    parser = argparse.ArgumentParser(description="Compare MKL and oneDNN.")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--record", type=Path)
    asked = parser.parse_args()
    check_record(asked.record)
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkl.is_available():
        sys.exit("this torch has not both MKL and oneDNN to compare")
    found = time_products(asked.repeats)
    print("product            MKL, GFLOP/s  oneDNN, GFLOP/s  MKL, ms a step  oneDNN, ms a step")
    for kind, both in found.items():
        speeds, times = zip(
            *((each.speed, each.milliseconds) for each in both.values()), strict=True
        )
        print(f"{kind:18}{speeds[0]:13,.0f}{speeds[1]:17,.0f}{times[0]:16,.0f}{times[1]:19,.0f}")
    sums = totals(found)
    print("products of a step: " + ", ".join(f"{name} {ms:,.0f} ms" for name, ms in sums.items()))
    fastest = min(sums, key=lambda name: sums[name])
    print(f"fastest: {fastest}; auto takes {choose()[0]} here; a row of the table is")
    print(f"    {row_of()}: {fastest!r}")
    rows = [
        row(f"{kind}: {name}", {"GFLOP/s": t.speed, "milliseconds": t.milliseconds})
        for kind, both in found.items()
        for name, t in both.items()
    ]
    append_record(asked.record, None, rows)


if __name__ == "__main__":
    main()
