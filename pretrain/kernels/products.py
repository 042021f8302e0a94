"""Choose the library of a CPU's matrix products in fp32: oneDNN on an AMD with AVX-512, else MKL.

On x86 torch has two: MKL, which it takes for fp32, and oneDNN, which it takes for half precision.
Which one is faster depends on the processor and on the kind of product (docs/performance.md). The
choice needs no measurement at the start, so equal commands have equal bits. It is part of a run, as
its precision is: a resumed run keeps it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Literal

CPUINFO = Path("/proc/cpuinfo")
Kind = Literal["forward", "input gradient", "weight gradient", "head"]
ProductsName = Literal["auto", "mkl", "head", "mixed", "onednn"]

# Which kinds oneDNN computes. The gradients of the head are added to a sum, which it cannot do.
ONEDNN: dict[str, frozenset[Kind]] = {
    "mkl": frozenset(),
    "head": frozenset({"head"}),
    "mixed": frozenset({"forward", "input gradient", "head"}),
    "onednn": frozenset({"forward", "input gradient", "weight gradient", "head"}),
}

_used: list[str] = []  # the innermost choice is the last


def processor() -> tuple[str, frozenset[str]]:
    """Return vendor and flags of the first processor; empty ones where Linux does not tell them."""
    try:
        text = CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        text = ""
    # The first processor is enough: up to the first empty line.
    lines = [line.partition(":") for line in text.partition("\n\n")[0].splitlines()]
    fields = {key.strip(): value.strip() for key, _, value in lines}
    return fields.get("vendor_id", ""), frozenset(fields.get("flags", "").split())


def choose() -> tuple[str, str]:
    """Return what `train.products: auto` means on this CPU, and the reason."""
    vendor, flags = processor()
    # Without AVX-512 oneDNN takes 1.5 times as long for gradients (docs/results/products.md).
    name = "onednn" if vendor == "AuthenticAMD" and "avx512f" in flags else "mkl"
    return name, f"{vendor or 'unknown'} CPU"


@contextmanager
def using(name: str) -> Iterator[None]:
    """Compute with the libraries of a choice, one of `ONEDNN`."""
    assert name in ONEDNN
    _used.append(name)
    try:
        yield
    finally:
        _used.pop()


def by_onednn(kind: Kind) -> bool:
    """Return whether oneDNN computes a kind of product: as a run says, else as `auto` does."""
    return kind in ONEDNN[_used[-1] if _used else _usual()]


@lru_cache(maxsize=1)
def _usual() -> str:
    return choose()[0]
