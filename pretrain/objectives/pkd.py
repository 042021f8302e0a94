"""Learn a task from a teacher's layers, too: BERT-PKD (Sun et al., arXiv 1908.09355, section 3).

    L = hard * L_labels + soft * T^2 KL(softmax(t / T) || softmax(s / T)) + patience * L_PT

    L_PT = sum over the student's layers i but its last of || f(h_i) - f(h'_I(i)) ||^2

h is the hidden state of [CLS] behind a layer, a prime marks the teacher, and f(h) = h / ||h||, or h
without `normalise`. L_PT is a mean over examples. `average: all` divides it by the number of layers
and by the width, as the authors' code does (`F.mse_loss`), and their weights, 10 to 1,000, belong
to that; `average: examples` is the paper's sum.

With C classes their code divides the KL by C as well: its alpha is `soft: alpha / C` and
`hard: 1 - alpha` here. Their settings that won are in docs/papers/bert-pkd.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from pretrain import RunError
from pretrain.contracts.needs import Part
from pretrain.contracts.terms import Shape, SignalTerm, Term, wide
from pretrain.objectives.finetune import labels_part, labels_term
from pretrain.objectives.kd import soft_term
from pretrain.objectives.objective import (
    OF_TASKS,
    Objective,
    check_width,
    even_layers,
    layer_pairs,
    layers_term,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pretrain.contracts.batch import Batch


class PatientDistillation(Objective):
    """Configure the weights, and the teacher's layers that the student's layers learn from.

    `layers` is "skip" (evenly spaced: 1, 3, 5, 7, 9 of 12 for 6 layers), "last" (those before the
    last: 6, 7, 8, 9, 10), or a layer of the teacher, counted from 0, for each layer of the student
    but its last.
    """

    tasks: ClassVar[Any] = ("classification",)
    defaults: ClassVar[Any] = OF_TASKS

    name: Literal["pkd"] = "pkd"
    temperature: float = Field(10.0, gt=0, le=1000)
    """T of the soft labels."""
    soft: float = Field(0.25, ge=0, le=1e6)
    """Weight of the soft labels."""
    hard: float = Field(0.5, ge=0, le=1e6)
    """Weight of the labels."""
    patience: float = Field(100.0, gt=0, le=1e6)
    """Weight of the hidden states of [CLS]."""
    layers: Literal["skip", "last"] | tuple[Annotated[int, Field(ge=0)], ...] = "skip"
    """`skip`: evenly spaced (1, 3, 5, 7, 9 of 12 for 6 layers), `last`: those before the last (6 to
    10), or the teacher's layer, from 0, for each of the student's but its last.
    """
    normalise: bool = True
    """Compare directions, not lengths."""
    average: Literal["all", "examples"] = "all"
    """`all` divides by layers and width, as the authors' code does; `examples` is the paper's sum.
    """

    @property
    def parts(self) -> tuple[Part, ...]:
        """Return the terms with a weight above 0."""
        soft = f"KL of soft labels at temperature {self.temperature:g}"
        layers = "squared difference of [CLS] behind layers"
        found = (
            Part("soft", self.soft, soft, "sequences", ("head",)),
            labels_part("hard", self.hard),
            Part(
                "patience",
                self.patience,
                layers,
                "sequences",
                ("layers",),
                sums=self.average != "all",
            ),
        )
        return tuple(part for part in found if part.weight > 0)

    def pairs(self, student: Shape, teacher: Shape) -> list[tuple[int, int]]:
        """Return each layer of the student that learns, with the teacher's.

        Raises:
            RunError: `layers` does not fit the models.
        """
        ours, theirs, layers = student.num_layers, teacher.num_layers, self.layers
        if ours < 2:
            raise RunError(
                "objective pkd: the student's last layer learns only from logits, and it has no "
                "other; give it 2 layers or more, or take objective kd"
            )
        if layers == "skip":
            # The student's last layer learns from logits.
            instead = f"list {ours - 1} layers of the teacher"
            layers = even_layers(ours, theirs, "objective.layers skip", instead)[:-1]
        elif layers == "last":
            layers = tuple(range(max(0, theirs - ours), theirs - 1))
        return [*layer_pairs(layers, ours, teacher, but=" but the last")]

    def check(self, student: Shape, teacher: Shape) -> None:
        """Refuse a map of layers that does not fit, and a width that differs from the teacher's."""
        self.pairs(student, teacher)
        check_width(self.name, student, teacher, ", or take objective kd")

    def terms(self, student: Shape, teacher: Shape | None) -> tuple[Term, ...]:
        """Return the terms with a weight above 0."""
        assert teacher is not None
        divisor = (student.num_layers - 1) * student.hidden_size if self.average == "all" else 1
        patience = patience_term(
            self.patience / divisor,
            pairs=self.pairs(student, teacher),
            normalise=self.normalise,
        )
        found = soft_term(self.soft, self.temperature), labels_term(self.hard)
        weights = self.soft, self.hard
        return (*(t for t, w in zip(found, weights, strict=True) if w > 0), patience)


def patience_term(
    weight: float, *, pairs: Sequence[tuple[int, int]], normalise: bool
) -> SignalTerm:
    """Return L_PT for pairs of a student's and a teacher's layer, a sum over layers and width."""
    from torch.nn.functional import normalize

    from pretrain.contracts.batch import PLACES

    def squares(
        batch: Batch, adapters: nn.ModuleDict, student_BLD: Tensor, teacher_BLD: Tensor
    ) -> Tensor:
        # [CLS] is the first token of an example; one that was left out of the run has no place.
        first_E = batch.labels[PLACES][:, 0]

        def cls(hidden_BLD: Tensor) -> Tensor:
            cls_ED = wide(hidden_BLD).flatten(0, 1).index_select(0, first_E.clamp(min=0))
            return normalize(cls_ED, dim=-1) if normalise else cls_ED

        squares_E = (cls(student_BLD) - cls(teacher_BLD)).square().sum(-1)
        return (squares_E * (first_E >= 0)).sum()

    return layers_term("patience", weight, "sequences", pairs, squares)
