"""Fine-tune on the labels of a task (BERT, arXiv 1810.04805, section 4).

    classes    L = CE(z, y)                       mean over examples
    a score    L = (z - y)^2                      mean over examples
    tags       L = CE(z, y)                       mean over words, at their first pieces
    an answer  L = (CE(z_start, y_start) + CE(z_end, y_end)) / 2    mean over rows

z are the logits of the task's head. Padding is no answer.

Shapes: E examples of up to P tokens, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pretrain.contracts.needs import Part
from pretrain.contracts.terms import Encoded, Shape, SignalTerm, Term, constant, wide
from pretrain.objectives.objective import Objective

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
    defaults: ClassVar[Any] = {"masking": {"probability": 0.0}}
    parts: ClassVar[Any] = (labels_part("", 1.0),)

    name: Literal["finetune"] = "finetune"

    def terms(self, student: Shape, teacher: Shape | None) -> tuple[Term, ...]:
        """Return the loss of the labels, with weight 1."""
        return (labels_term(1.0),)


def labels_term(weight: float) -> SignalTerm:
    """Return the loss of the labels, a mean over the labelled examples of a task."""
    from pretrain.contracts.batch import PLACES

    def total(
        student: Encoded, teacher: Encoded | None, batch: Batch, adapters: nn.ModuleDict
    ) -> Tensor:
        assert student.task_logits is not None
        return loss_of_labels(student.task_logits, batch.labels, batch.labels[PLACES] >= 0)

    return SignalTerm("labels", constant(weight), "labelled", total, False)


def loss_of_labels(logits: Tensor, labels: Mapping[str, Tensor], there_EP: Tensor) -> Tensor:
    """Return the sum of the losses of a micro-batch's labels; -100 and NaN are none.

    Args:
        logits: [E, C], of tags [E, P, C], of answers [E, P, 2].
        labels: "class" [E], "score" [E], "tags" [E, P], or "start" and "end" [E].
        there_EP: False behind an example.
    """
    from torch.nn.functional import cross_entropy

    logits = wide(logits)
    if "class" in labels:
        return cross_entropy(logits, labels["class"].long(), reduction="sum")
    if "score" in labels:
        score_E = labels["score"].to(logits.dtype)
        known = ~score_E.isnan()
        return ((logits.squeeze(-1) - score_E.nan_to_num()).square() * known).sum()
    if "tags" in labels:
        tags_N = labels["tags"].long().flatten()
        return cross_entropy(logits.flatten(0, 1), tags_N, reduction="sum")
    ends_EP2 = answers(logits, there_EP)
    losses = [
        cross_entropy(ends_EP2[..., i], labels[name].long(), reduction="sum")
        for i, name in enumerate(("start", "end"))
    ]
    return (losses[0] + losses[1]) / 2


def answers(logits_EP2: Tensor, there_EP: Tensor) -> Tensor:
    """Return the logits of starts and ends, with no chance for padding."""
    lowest = -1e30  # finite, so that a row without tokens has a gradient of 0 and not NaN
    return logits_EP2.masked_fill(~there_EP[..., None], lowest)
