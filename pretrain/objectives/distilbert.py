"""Define the triple loss of DistilBERT (Sanh et al. 2019, arXiv 1910.01108, section 3).

    L = kl * L_ce + mlm * L_mlm + cosine * L_cos  (+ mse * L_mse + hidden_mse * L_hid)

L_ce  = T^2 KL(teacher || student) at temperature T, mean over all tokens (or masked ones),
L_mlm = cross-entropy of the masked tokens, mean over them,
L_cos = 1 - cos(last hidden states), mean over all tokens.

Weights 5 / 2 / 1 and T = 2 are what the authors used. Two more are 0 by default:
L_mse = squared distance of the logits, an option of the authors' code, over the tokens of L_ce,
L_hid = mean squared difference of the last hidden states, mean over all tokens.
`divergence` replaces L_ce by T^2 KL(student || teacher), "reverse", or by T^2 JS, "js".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from pretrain import RunError
from pretrain.contracts.terms import Encoded, Shape, SignalTerm, Term, constant, wide
from pretrain.objectives.mlm import MLM
from pretrain.objectives.objective import Objective, Part

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pretrain.contracts.batch import Batch


class DistilBert(Objective):
    """Configure the triple loss; a term of weight 0 is not computed (the paper's ablations)."""

    needs_teacher: ClassVar[bool] = True  # also where no term compares: the student is cut from it

    name: Literal["distilbert"] = "distilbert"
    temperature: float = Field(2.0, gt=0, le=1000)
    """T of the divergence."""
    kl: float = Field(5.0, ge=0, le=1e6)
    """Weight of the divergence from the teacher's distribution."""
    mlm: float = Field(2.0, ge=0, le=1e6)
    """Weight of masked language modelling."""
    cosine: float = Field(1.0, ge=0, le=1e6)
    """Weight of the distance of the last hidden states."""
    mse: float = Field(0.0, ge=0, le=1e6)
    """Weight of the squared difference of logits, which takes the slower way."""
    hidden_mse: float = Field(0.0, ge=0, le=1e6)
    """Weight of the squared difference of the last hidden states."""
    kl_positions: Literal["all", "masked"] = "all"
    """Tokens at which distributions are compared: all but padding, or masked ones."""
    divergence: Literal["forward", "reverse", "js"] = "forward"
    """KL(teacher || student) as in the paper, KL(student || teacher), or Jensen-Shannon; the last
    two take the slower way.
    """

    @model_validator(mode="after")
    def _some_term(self) -> DistilBert:
        if self.kl == self.mlm == self.cosine == self.mse == self.hidden_mse == 0:
            raise ValueError("kl, mlm and cosine are all 0: set one, e.g. objective.kl: 5")
        if self.kl == 0 and self.divergence != "forward":
            raise ValueError(f"divergence {self.divergence}: kl is 0, and it is kl's formula")
        return self

    @property
    def published(self) -> str:
        """Return the paper's name if this is its objective; empty for an ablation or a variant."""
        return "the objective of DistilBERT, arXiv 1910.01108" if self == DistilBert() else ""

    @property
    def parts(self) -> tuple[Part, ...]:
        """Return the terms with a weight above 0."""
        kl = {
            "forward": "KL(teacher || student)",
            "reverse": "KL(student || teacher)",
            "js": "Jensen-Shannon divergence",
        }[self.divergence]
        where, over = f"over {self.kl_positions} tokens", self._over
        kl += f" at temperature {self.temperature:g} {where}"
        found = (
            Part("kl", self.kl, kl, over, logits=True),
            Part("mlm", self.mlm, MLM, "masked", logits=True, teacher=False),
            Part("cosine", self.cosine, "cosine distance of the last hidden states"),
            Part("mse", self.mse, f"squared distance of the logits {where}", over, logits=True),
            Part(
                "hidden_mse",
                self.hidden_mse,
                "mean squared difference of the last hidden states",
            ),
        )
        return tuple(part for part in found if part.weight > 0)

    @property
    def _over(self) -> str:
        return "tokens" if self.kl_positions == "all" else "masked"

    def check(self, student: Shape, teacher: Shape) -> None:
        """Refuse widths that differ where hidden states are compared."""
        # The other terms compare logits, whose width is the vocabulary's.
        for key, weight in (("cosine", self.cosine), ("hidden_mse", self.hidden_mse)):
            if weight > 0 and student.hidden_size != teacher.hidden_size:
                raise RunError(
                    f"objective.{key} {weight:g}: compares hidden states of equal width, but the "
                    f"student has {student.hidden_size} and the teacher {teacher.hidden_size}; set "
                    f"objective.{key}: 0, or take a student of the teacher's width"
                )

    def terms(self, student: Shape, teacher: Shape | None) -> tuple[Term, ...]:
        """Return the terms with a weight above 0."""
        if teacher is not None:
            self.check(student, teacher)
        from pretrain.objectives.vocabulary_terms import (
            divergence_term,
            kl_term,
            mlm_term,
            mse_term,
        )

        # The fused kernels compute the paper's formula; a variant runs through autograd.
        kl = kl_term(self.kl, temperature=self.temperature, over=self._over)
        if self.divergence != "forward":
            kl = divergence_term(
                self.kl, kind=self.divergence, temperature=self.temperature, over=self._over
            )
        terms: tuple[tuple[float, Term], ...] = (
            (self.kl, kl),
            (self.mlm, mlm_term(self.mlm)),
            (self.cosine, cosine_term(self.cosine)),
            (self.mse, mse_term(self.mse, over=self._over)),
            (self.hidden_mse, hidden_mse_term(self.hidden_mse)),
        )
        # A term of weight 0 would cost its whole computation and change nothing.
        return tuple(term for weight, term in terms if weight > 0)


def cosine_distance(student_ND: Tensor, teacher_ND: Tensor) -> Tensor:
    """Compute 1 - cos(student, teacher) [N]: L_cos, on last hidden states."""
    from torch.nn.functional import cosine_similarity

    return 1 - cosine_similarity(wide(student_ND), wide(teacher_ND), dim=-1)


def cosine_term(weight: float) -> SignalTerm:
    """Return the cosine term: last hidden states of student and teacher."""

    def total(
        student: Encoded, teacher: Encoded | None, batch: Batch, adapters: nn.ModuleDict
    ) -> Tensor:
        assert teacher is not None
        # The mask leaves padding out, whose hidden states mean nothing. `count` is the number of
        # tokens, so this sum becomes the mean over all tokens.
        values_BL = cosine_distance(student.last_hidden_state, teacher.last_hidden_state)
        return (values_BL * batch.packing.token_mask).sum()

    return SignalTerm("cosine", constant(weight), "tokens", total, True)


def hidden_mse_term(weight: float) -> SignalTerm:
    """Return the mean squared difference of the last hidden states of student and teacher."""

    def total(
        student: Encoded, teacher: Encoded | None, batch: Batch, adapters: nn.ModuleDict
    ) -> Tensor:
        assert teacher is not None
        ours, theirs = (wide(model.last_hidden_state) for model in (student, teacher))
        return ((ours - theirs).square().mean(-1) * batch.packing.token_mask).sum()

    return SignalTerm("hidden_mse", constant(weight), "tokens", total, True)
