"""The vocabulary of objectives: signals, and terms that are computed from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

SignalName = Literal["logits", "last_hidden_state"]


@dataclass(frozen=True)
class Signals:
    """What one model shows of N positions; only what some term asked for is filled in.

    Logits come tile by tile (the vocabulary head never holds them all), so a term must treat
    positions independently.
    """

    logits: Tensor | None = None  # [N, V]
    last_hidden_state: Tensor | None = None  # [N, D]


@dataclass(frozen=True)
class Term:
    """One term of a loss: sum(weight * values) / number of positions in `over`, over a whole step.

    `values(student, teacher, labels)` gives one number a position [N]; labels [N] are -100 where
    nothing is predicted. `over` is "tokens" (all but padding) or "masked" (selected positions).
    """

    name: str
    weight: float
    over: Literal["tokens", "masked"]
    signal: SignalName
    values: Callable[[Signals, Signals, Tensor], Tensor]
    needs_teacher: bool = True
