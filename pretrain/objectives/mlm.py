"""Define masked language modelling (BERT, arXiv 1810.04805, section 3.1; no NSP)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pretrain.contracts.needs import Part
from pretrain.contracts.terms import Shape, Term
from pretrain.objectives.objective import Objective

MLM = "cross-entropy of the masked tokens"


class MaskedLanguageModel(Objective):
    """Train a BERT of the sizes under `model:`, for instance to be a teacher."""

    needs_teacher: ClassVar[bool] = False
    # Not published by a paper: BERT's objective has a second term.
    parts: ClassVar[tuple[Part, ...]] = (
        Part("mlm", 1.0, MLM, "masked", ("logits",), teacher=False),
    )

    name: Literal["mlm"] = "mlm"

    def terms(self, student: Shape, teacher: Shape | None) -> tuple[Term, ...]:
        """Return the cross-entropy of the masked tokens, with weight 1."""
        from pretrain.objectives.vocabulary_terms import mlm_term

        return (mlm_term(1.0),)
