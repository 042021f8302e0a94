"""The vocabulary of objectives: signals, and terms that are computed from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from pretrain.losses import cosine_distance, cross_entropy, kl_divergence

Over = Literal["tokens", "masked"]
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
    `what` is the value in words, for a model card.
    """

    name: str
    weight: float
    over: Over
    signal: SignalName
    values: Callable[[Signals, Signals, Tensor], Tensor]
    needs_teacher: bool = True
    what: str = ""


@dataclass(frozen=True)
class KLDivergence:
    """Values of a term: T^2 KL(teacher || student); the head has its gradient in closed form."""

    temperature: float

    def __call__(self, student: Signals, teacher: Signals, labels: Tensor) -> Tensor:
        """[N]."""
        assert student.logits is not None and teacher.logits is not None
        return kl_divergence(student.logits, teacher.logits, temperature=self.temperature)


@dataclass(frozen=True)
class CrossEntropy:
    """Values of a term: -log p(label); the head has its gradient in closed form."""

    def __call__(self, student: Signals, teacher: Signals, labels: Tensor) -> Tensor:
        """[N]."""
        assert student.logits is not None
        return cross_entropy(student.logits, labels)


def kl_term(weight: float, *, temperature: float, over: Over = "tokens") -> Term:
    """Soft targets: the student's distribution against the teacher's (Hinton et al. 2015)."""
    positions = "all" if over == "tokens" else "masked"
    what = f"KL(teacher || student) at temperature {temperature:g} over {positions} tokens"
    return Term("kl", weight, over, "logits", KLDivergence(temperature), what=what)


def mlm_term(weight: float) -> Term:
    """The cross-entropy of the masked tokens, for any objective that has it as a part."""
    what = "cross-entropy of the masked tokens"
    return Term("mlm", weight, "masked", "logits", CrossEntropy(), needs_teacher=False, what=what)


def cosine_term(weight: float) -> Term:
    """1 - cos of the last hidden states, over all tokens."""
    what = "cosine distance of the last hidden states"
    return Term("cosine", weight, "tokens", "last_hidden_state", _cosine, what=what)


def _cosine(student: Signals, teacher: Signals, labels: Tensor) -> Tensor:
    assert student.last_hidden_state is not None and teacher.last_hidden_state is not None
    return cosine_distance(student.last_hidden_state, teacher.last_hidden_state)
