"""Define the sizes of models and rows: BERT-base and its student, or tiny ones to rehearse."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Hold the sizes; the student has half the layers, `rows` is the micro-batch."""

    width: int = 768
    layers: int = 12
    vocabulary: int = 30522
    length: int = 512
    rows: int = 64
    fewer_rows: tuple[int, ...] = (8, 32)
    repeats: int = 10
    matmul: int = 8192  # side of a square product, for the peak
    copied: int = 1 << 32  # bytes
    head_positions: int = 4200  # of the comparison of heads; the last chunk is not full


TINY = Sizes(
    width=32,
    layers=2,
    vocabulary=211,
    length=16,
    rows=4,
    fewer_rows=(1, 2),
    repeats=2,
    matmul=64,
    copied=1 << 16,
    head_positions=70,
)
