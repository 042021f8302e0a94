"""Define the seven losses of the BERT-Insights study (amandalmia14/bert-insights).

    L = L_labels + (logits L_log + hidden sum over i of L_i + embedding L_emb) / K

L_log = KL(softmax(t) || softmax(s))
L_i   = mean (LN(H_i) - LN(H'_i))^2,      H = the output of a layer
L_emb = mean (LN(E) - LN(E'))^2,          E = the output of the embeddings

LN normalises all numbers of an example together, its tokens and width, without weights; the means
are over those, and over examples. K is the number of terms that are on, each layer of the student
counted. A prime marks the teacher, and s and t are logits. The study has the cross-entropy for
L_log, which is larger by the teacher's entropy, a constant.

The authors' code does something else: their student holds the teacher's own layers, so that the
teacher trains, too; L_log has no gradient beside another term; dropout is off, the teacher's head
random, and padding counts. The published grid, and what that makes of it:
docs/papers/bert-insights.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from pretrain.contracts.needs import Part
from pretrain.contracts.terms import Shape, SignalTerm, Term, wide
from pretrain.objectives.finetune import labels_part, labels_term
from pretrain.objectives.kd import soft_term
from pretrain.objectives.objective import OF_TASKS, Objective, check_width, layer_pairs, layers_term

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pretrain.contracts.batch import Batch

_EPSILON = 1e-5  # torch's epsilon of a normalisation


class Insights(Objective):
    """Switch each loss on or off; `layers` has a layer of the teacher for each of the student's."""

    tasks: ClassVar[Any] = ("classification",)
    defaults: ClassVar[Any] = OF_TASKS

    name: Literal["insights"] = "insights"
    logits: bool = False
    """Compare the teacher's distribution."""
    hidden: bool = False
    """Compare hidden states behind layers."""
    embedding: bool = False
    """Compare the output of the embeddings."""
    layers: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]
    """The teacher's layer, from 0, for each of the student's."""

    @model_validator(mode="after")
    def _some_term(self) -> Insights:
        if not (self.logits or self.hidden or self.embedding):
            raise ValueError("logits, hidden and embedding are all off: set one of them to true")
        return self

    @property
    def share(self) -> float:
        """Return 1 / K."""
        return 1.0 / (self.logits + self.hidden * len(self.layers) + self.embedding)

    @property
    def parts(self) -> tuple[Part, ...]:
        """Return the terms that are on."""
        share, over, squares = self.share, "sequences", "squared difference of normalised"
        # Reading `layers` makes the teacher run in each step, even if only logits are compared.
        logits = Part("", share, "KL of soft labels at temperature 1", over, ("head", "layers"))
        hidden = Part("", share, f"{squares} hidden states", over, ("layers",))
        found = (
            (self.logits, logits),
            (self.hidden, hidden),
            (self.embedding, hidden._replace(text=f"{squares} embeddings")),
        )
        return (labels_part("", 1.0), *(part for on, part in found if on))

    def check(self, student: Shape, teacher: Shape) -> None:
        """Refuse layers that are not those of the models, and a different width."""
        layer_pairs(self.layers, student.num_layers, teacher)
        if self.hidden or self.embedding:
            check_width(self.name, student, teacher)

    def terms(self, student: Shape, teacher: Shape | None) -> tuple[Term, ...]:
        """Return the labels' loss, and the terms that are on."""
        assert teacher is not None
        share, pairs = self.share, layer_pairs(self.layers, student.num_layers, teacher)
        found: list[Term] = [labels_term(1.0)]
        found += [soft_term(share, 1.0)] if self.logits else []
        found += [normalised_term("hidden", share, pairs)] if self.hidden else []
        found += [normalised_term("embedding", share, [(-1, -1)])] if self.embedding else []
        return tuple(found)


def normalised_term(name: str, weight: float, pairs: Sequence[tuple[int, int]]) -> SignalTerm:
    """Return the sum over pairs of layers, -1 for the embeddings, of L_i of the examples."""
    from pretrain.contracts.batch import PLACES, apart

    def normalised(hidden_BLD: Tensor, places_EP: Tensor) -> Tensor:
        hidden_EPD, there_EP = apart(wide(hidden_BLD), places_EP)
        there_EP1 = there_EP[..., None]
        count_E = there_EP.sum(1).clamp(min=1).to(hidden_EPD.dtype) * hidden_EPD.shape[-1]
        count_E11 = count_E[:, None, None]
        mean_E11 = hidden_EPD.sum((1, 2), keepdim=True) / count_E11
        centred_EPD = (hidden_EPD - mean_E11) * there_EP1
        variance_E11 = centred_EPD.square().sum((1, 2), keepdim=True) / count_E11
        return centred_EPD / (variance_E11 + _EPSILON).sqrt() / count_E11.sqrt()

    def squares(
        batch: Batch, adapters: nn.ModuleDict, student_BLD: Tensor, teacher_BLD: Tensor
    ) -> Tensor:
        s, t = (normalised(of, batch.labels[PLACES]) for of in (student_BLD, teacher_BLD))
        return (s - t).square().sum()

    return layers_term(name, weight, "sequences", pairs, squares)
