"""Fine-tune on the labels of a task (BERT, arXiv 1810.04805, section 4).

    classes    L = CE(z, y)                       mean over examples
    a score    L = (z - y)^2                      mean over examples
    tags       L = CE(z, y)                       mean over words, at their first pieces
    an answer  L = (CE(z_start, y_start) + CE(z_end, y_end)) / 2    mean over rows

z are the logits of the task's head, whose file (`pretrain/tasks/task_heads.py`) has these formulas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pretrain.contracts.needs import Part
from pretrain.contracts.terms import Encoded, Shape, SignalTerm, Term, constant, wide
from pretrain.objectives.objective import OF_TASKS, Objective

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pretrain.contracts.batch import Batch

TASKS = ("classification", "token_classification", "question_answering")


def labels_part(key: str, weight: float) -> Part:
    """Return what the loss of the labels reads."""
    text = "the loss of the labels"
    return Part(key, weight, text, "labelled", ("head", "labels"), teacher=False)


class FineTuning(Objective):
    """Train a model of `model:` on the labels of the shards."""

    tasks: ClassVar[Any] = TASKS
    needs_teacher: ClassVar[bool] = False
    defaults: ClassVar[Any] = OF_TASKS
    parts: ClassVar[Any] = (labels_part("", 1.0),)

    name: Literal["finetune"] = "finetune"

    def terms(self, student: Shape, teacher: Shape | None) -> tuple[Term, ...]:
        """Return the loss of the labels, with weight 1."""
        return (labels_term(1.0),)


def labels_term(weight: float) -> SignalTerm:
    """Return the loss of the labels, a mean over the labelled examples of a task."""
    from pretrain.contracts.batch import PLACES
    from pretrain.tasks.task_heads import head_of

    def total(
        student: Encoded, teacher: Encoded | None, batch: Batch, adapters: nn.ModuleDict
    ) -> Tensor:
        assert student.task_logits is not None
        logits, labels = wide(student.task_logits), batch.labels
        return head_of(labels).loss(logits, labels, labels[PLACES] >= 0)

    return SignalTerm("labels", constant(weight), "labelled", total, False)
