"""DistilBERT: the triple loss (Sanh et al. 2019, arXiv 1910.01108, section 3).

    L = kl * L_ce + mlm * L_mlm + cosine * L_cos

L_ce  = T^2 KL(teacher || student) at temperature T, mean over all tokens (or masked ones),
L_mlm = cross-entropy of the masked tokens, mean over them,
L_cos = 1 - cos(last hidden states), mean over all tokens.

Weights 5 / 2 / 1 and T = 2 are what the authors used.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from pretrain.losses import cosine_distance, kl_divergence
from pretrain.objectives.mlm import mlm_term
from pretrain.objectives.terms import Signals, Term


class DistilBert(BaseModel):
    """The triple loss; a term whose weight is 0 is not computed (the paper's ablations)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Literal["distilbert"] = "distilbert"
    temperature: float = Field(2.0, gt=0)
    kl: float = Field(5.0, ge=0)
    mlm: float = Field(2.0, ge=0)
    cosine: float = Field(1.0, ge=0)
    kl_positions: Literal["all", "masked"] = "all"

    @model_validator(mode="after")
    def _some_term(self) -> DistilBert:
        if self.kl == self.mlm == self.cosine == 0:
            raise ValueError("kl, mlm and cosine are all 0: give at least one term a weight")
        return self

    @property
    def needs_teacher(self) -> bool:
        """A student is always distilled from, and compared with, a teacher."""
        return True

    def terms(self) -> tuple[Term, ...]:
        """The terms with a weight above 0."""
        over: Literal["tokens", "masked"] = "tokens" if self.kl_positions == "all" else "masked"
        terms = (
            Term("kl", self.kl, over, "logits", self._kl),
            mlm_term(self.mlm),
            Term("cosine", self.cosine, "tokens", "last_hidden_state", _cosine),
        )
        return tuple(term for term in terms if term.weight > 0)

    def _kl(self, student: Signals, teacher: Signals, labels: Tensor) -> Tensor:
        assert student.logits is not None and teacher.logits is not None
        return kl_divergence(student.logits, teacher.logits, temperature=self.temperature)


def _cosine(student: Signals, teacher: Signals, labels: Tensor) -> Tensor:
    assert student.last_hidden_state is not None and teacher.last_hidden_state is not None
    return cosine_distance(student.last_hidden_state, teacher.last_hidden_state)
