"""Distil a task from soft labels (Hinton et al., arXiv 1503.02531).

    L = soft * T^2 KL(softmax(t / T) || softmax(s / T)) + hard * L_labels

s and t are the logits of the student's and the teacher's head. T^2 keeps the size of the gradient
the same for any temperature (section 2). The soft term is a mean over all rows, with a label or
without: of tags the mean over a row's tokens, of answers that of starts and ends. A score is
compared by (s - t)^2, without a temperature. `L_labels` is that of `finetune.py`.

With `divergence: squared` the soft term is the distilled BiLSTM's (Tang et al. 2019, arXiv
1903.12136): sum over classes of (s - t)^2, without a temperature. Their code takes the mean over
classes.

t comes from a teacher with a head for the task, or, without one, from the probabilities q in the
data: t = log q.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from pretrain.contracts.needs import Part
from pretrain.contracts.terms import Encoded, Shape, SignalTerm, Term, constant, wide
from pretrain.objectives.finetune import TASKS, labels_part, labels_term
from pretrain.objectives.objective import OF_TASKS, Objective

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pretrain.contracts.batch import Batch


class SoftLabels(Objective):
    """Train on soft labels of a teacher or of the data, and on labels; weight 0 leaves one out.

    With `soft: 0` a student that is cut from a teacher learns from labels only, and the teacher may
    have no head.
    """

    tasks: ClassVar[Any] = TASKS
    defaults: ClassVar[Any] = OF_TASKS

    name: Literal["kd"] = "kd"
    temperature: float = Field(2.0, gt=0, le=1000)
    """T of the soft labels."""
    divergence: Literal["kl", "squared"] = "kl"
    """Of soft labels: KL, or the squared difference of logits."""
    soft: float = Field(0.5, ge=0, le=1e6)
    """Weight of the soft labels."""
    hard: float = Field(0.5, ge=0, le=1e6)
    """Weight of the labels."""

    @model_validator(mode="after")
    def _no_temperature(self) -> SoftLabels:
        own = type(self).model_fields["temperature"].default
        if self.divergence == "squared" and self.temperature != own:  # a checkpoint has all keys
            raise ValueError("divergence squared has no temperature: remove one of the two keys")
        return self

    @property
    def parts(self) -> tuple[Part, ...]:
        """Return the terms with a weight above 0."""
        soft = f"KL of soft labels at temperature {self.temperature:g}"
        if self.divergence == "squared":
            soft = "squared difference of the logits"
        found = (
            Part("soft", self.soft, soft, "sequences", ("head",)),
            labels_part("hard", self.hard),
        )
        return tuple(part for part in found if part.weight > 0)

    def terms(self, student: Shape, teacher: Shape | None) -> tuple[Term, ...]:
        """Return the terms with a weight above 0."""
        temperature = None if self.divergence == "squared" else self.temperature
        found = soft_term(self.soft, temperature), labels_term(self.hard)
        return tuple(t for t, w in zip(found, (self.soft, self.hard), strict=True) if w > 0)


def soft_term(weight: float, temperature: float | None) -> SignalTerm:
    """Return the comparison with the teacher's logits, "teacher_logits" of a batch.

    Without a temperature it is the squared difference, not the KL divergence.
    """
    from pretrain.contracts.batch import PLACES
    from pretrain.tasks.task_heads import head_of

    def total(
        student: Encoded, teacher: Encoded | None, batch: Batch, adapters: nn.ModuleDict
    ) -> Tensor:
        assert student.task_logits is not None
        labels = batch.labels
        ours, there_EP = wide(student.task_logits), labels[PLACES] >= 0
        if "teacher_logits" in labels:
            theirs = labels["teacher_logits"].to(ours.dtype)
        else:
            theirs = labels["probs"].to(ours.dtype).clamp(min=1e-8).log()
        return head_of(labels).soft(ours, theirs, there_EP, temperature)

    return SignalTerm("soft", constant(weight), "sequences", total, True)
