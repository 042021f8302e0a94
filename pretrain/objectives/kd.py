"""Distil a task from soft labels (Hinton et al., arXiv 1503.02531).

    L = soft * T^2 KL(softmax(t / T) || softmax(s / T)) + hard * L_labels

s and t are the logits of the student's and the teacher's head. T^2 keeps the size of the gradient
the same for any temperature (section 2). The soft term is a mean over all rows, with a label or
without: of tags the mean over a row's tokens, of answers that of starts and ends. A score is
compared by (s - t)^2, without a temperature. `L_labels` is that of `finetune.py`.

t comes from a teacher with a head for the task, or, without one, from the probabilities q in the
data: t = log q.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from pretrain.contracts.terms import Encoded, Shape, SignalTerm, Term, constant, wide
from pretrain.objectives.finetune import TASKS, answers, labels_term
from pretrain.objectives.objective import Objective, Part

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pretrain.contracts.batch import Batch


class SoftLabels(Objective):
    """Train on soft labels of a teacher or of the data, and on labels; weight 0 leaves one out.

    With `soft: 0` a student that is cut from a teacher learns from labels only, and the teacher may
    have no head.
    """

    tasks: ClassVar = TASKS
    defaults: ClassVar = {"masking": {"probability": 0.0}}

    name: Literal["kd"] = "kd"
    temperature: float = Field(2.0, gt=0, le=1000)
    soft: float = Field(0.5, ge=0, le=1e6)
    hard: float = Field(0.5, ge=0, le=1e6)

    @model_validator(mode="after")
    def _some_term(self) -> SoftLabels:
        if self.soft == self.hard == 0:
            raise ValueError("soft and hard are both 0: give a term a weight")
        return self

    @property
    def parts(self) -> tuple[Part, ...]:
        """Return the terms with a weight above 0."""
        soft = f"KL of soft labels at temperature {self.temperature:g}"
        found = (
            Part("soft", self.soft, soft, "sequences"),
            Part("hard", self.hard, "the loss of the labels", "labelled", teacher=False),
        )
        return tuple(part for part in found if part.weight > 0)

    def terms(self, student: Shape, teacher: Shape | None) -> tuple[Term, ...]:
        """Return the terms with a weight above 0."""
        found = soft_term(self.soft, self.temperature), labels_term(self.hard)
        return tuple(t for t, w in zip(found, (self.soft, self.hard), strict=True) if w > 0)


def soft_term(weight: float, temperature: float) -> SignalTerm:
    """Return the comparison with the teacher's logits, "teacher_logits" of a batch."""
    from torch.nn.functional import kl_div

    def total(
        student: Encoded, teacher: Encoded | None, batch: Batch, adapters: nn.ModuleDict
    ) -> Tensor:
        assert student.task_logits is not None
        ours, mask_BL = wide(student.task_logits), batch.packing.token_mask
        labels = batch.labels
        if "teacher_logits" in labels:
            theirs = labels["teacher_logits"].to(ours.dtype)
        else:
            theirs = labels["probs"].to(ours.dtype).clamp(min=1e-8).log()
        if ours.shape[-1] == 1:
            row_B = mask_BL[:, 0]
            return ((ours - theirs).square().squeeze(-1) * row_B).sum()
        scale = 1.0
        if "start" in labels:  # a distribution over the positions of a row
            ours, theirs = (answers(logits, mask_BL).mT for logits in (ours, theirs))
            scale = 0.5
        log_s, log_t = ((logits / temperature).log_softmax(-1) for logits in (ours, theirs))
        values = kl_div(log_s, log_t, reduction="none", log_target=True).sum(-1)
        if "tags" in labels:
            # A mean over the tokens of a row, so that this term too is a mean over rows.
            values = (values * mask_BL).sum(1) / mask_BL.sum(1).clamp(min=1)
            return values.sum() * temperature**2
        there = mask_BL[:, :1] if values.dim() == 2 else mask_BL[:, 0]
        return (values * there).sum() * scale * temperature**2

    return SignalTerm("soft", constant(weight), "sequences", total, True)
