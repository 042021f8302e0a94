"""Define the triple loss of DistilBERT (Sanh et al. 2019, arXiv 1910.01108, section 3).

    L = kl * L_ce + mlm * L_mlm + cosine * L_cos  (+ mse * L_mse + hidden_mse * L_hid)

L_ce  = T^2 KL(teacher || student) at temperature T, mean over all tokens (or masked ones),
L_mlm = cross-entropy of the masked tokens, mean over them,
L_cos = 1 - cos(last hidden states), mean over all tokens.

Weights 5 / 2 / 1 and T = 2 are what the authors used. Two more are 0 by default:
L_mse = squared distance of the logits, an option of the authors' code, over the tokens of L_ce,
L_hid = mean squared difference of the last hidden states, mean over all tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from pretrain import RunError
from pretrain.contracts.needs import Part
from pretrain.contracts.terms import Encoded, Shape, SignalTerm, Term, constant, wide
from pretrain.objectives.mlm import MLM
from pretrain.objectives.objective import Objective

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
    """Weight of the squared difference of logits. Slower: autograd keeps all logits of a chunk."""
    hidden_mse: float = Field(0.0, ge=0, le=1e6)
    """Weight of the squared difference of the last hidden states."""
    kl_positions: Literal["all", "masked"] = "all"
    """Tokens at which distributions are compared: all but padding, or masked ones."""

    @property
    def published(self) -> str:
        """Return the paper's name if this is its objective; empty for an ablation or a variant."""
        return "the objective of DistilBERT, arXiv 1910.01108" if self == DistilBert() else ""

    @property
    def parts(self) -> tuple[Part, ...]:
        """Return the terms with a weight above 0."""
        where, over = f"over {self.kl_positions} tokens", self._over
        kl = f"KL(teacher || student) at temperature {self.temperature:g} {where}"
        found = (
            Part("kl", self.kl, kl, over, ("logits",)),
            Part("mlm", self.mlm, MLM, "masked", ("logits",), teacher=False),
            Part("cosine", self.cosine, "cosine distance of the last hidden states"),
            Part("mse", self.mse, f"squared distance of the logits {where}", over, ("logits",)),
            Part(
                "hidden_mse", self.hidden_mse, "mean squared difference of the last hidden states"
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
        from pretrain.objectives.vocabulary_terms import kl_term, mlm_term, mse_term

        terms: tuple[tuple[float, Term], ...] = (
            (self.kl, kl_term(self.kl, temperature=self.temperature, over=self._over)),
            (self.mlm, mlm_term(self.mlm)),
            (self.cosine, hidden_term("cosine", self.cosine, cosine_distance)),
            (self.mse, mse_term(self.mse, over=self._over)),
            (self.hidden_mse, hidden_term("hidden_mse", self.hidden_mse, squared_distance)),
        )
        # A term of weight 0 would cost its whole computation and change nothing.
        return tuple(term for weight, term in terms if weight > 0)


def cosine_distance(student_ND: Tensor, teacher_ND: Tensor) -> Tensor:
    """Compute 1 - cos(student, teacher) [N]: L_cos, on last hidden states."""
    from torch.nn.functional import cosine_similarity

    return 1 - cosine_similarity(wide(student_ND), wide(teacher_ND), dim=-1)


def squared_distance(student_ND: Tensor, teacher_ND: Tensor) -> Tensor:
    """Compute mean((student - teacher)^2) [N]: L_hid, on last hidden states."""
    return (wide(student_ND) - wide(teacher_ND)).square().mean(-1)


def hidden_term(name: str, weight: float, distance: Callable[..., Tensor]) -> SignalTerm:
    """Return a term that compares the last hidden states of student and teacher."""

    def total(
        student: Encoded, teacher: Encoded | None, batch: Batch, adapters: nn.ModuleDict
    ) -> Tensor:
        assert teacher is not None
        # The mask leaves padding out, whose hidden states mean nothing. `count` is the number of
        # tokens, so this sum becomes the mean over all tokens.
        values_BL = distance(student.last_hidden_state, teacher.last_hidden_state)
        return (values_BL * batch.packing.token_mask).sum()

    return SignalTerm(name, constant(weight), "tokens", total, True)
