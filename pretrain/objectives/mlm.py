"""Masked language modelling without a teacher (BERT, arXiv 1810.04805, section 3.1; no NSP)."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict
from torch import Tensor

from pretrain.losses import cross_entropy
from pretrain.objectives.terms import Signals, Term


class MaskedLanguageModel(BaseModel):
    """Trains a BERT of the sizes under `model:`, for want of a teacher."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Literal["mlm"] = "mlm"

    @property
    def needs_teacher(self) -> bool:
        """No."""
        return False

    def terms(self) -> tuple[Term, ...]:
        """The one term."""
        return (mlm_term(1.0),)


def mlm_term(weight: float) -> Term:
    """The cross-entropy of the masked tokens, for any objective that has it as a part."""
    return Term("mlm", weight, "masked", "logits", _mlm, needs_teacher=False)


def _mlm(student: Signals, teacher: Signals, labels: Tensor) -> Tensor:
    assert student.logits is not None
    return cross_entropy(student.logits, labels)
