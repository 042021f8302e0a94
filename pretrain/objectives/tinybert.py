"""Define the distillation of layers of TinyBERT (Jiao et al. 2020, arXiv 1909.10351, section 3.1).

    L = attention * L_att + hidden * L_hid + embedding * L_emb

L_att = sum over the student's layers of MSE(S, S'),          S = Q K^T / sqrt(d) before the softmax
L_hid = sum over the student's layers of MSE(W H + b, H'),    H = the output of a layer
L_emb = MSE(W E + b, E'),                                     E = the output of the embeddings

On a corpus it is the paper's general distillation. On the examples of a task, with a fine-tuned
teacher, it is the first of two runs of its task distillation: the second, which continues with
`student.init: RUN`, is objective `kd` with `temperature: 1`, `soft: 1` and `hard: 0`. Their code
divides that cross-entropy by the number of classes, and of scores it compares labels.

A prime marks the teacher. W and b are one linear layer for embeddings and all layers, also where
both widths are equal, as in the authors' code. It is trained and not exported. There it begins as
the identity: from random weights, as theirs, a student of copied layers leaves the teacher's basis.

L_hid and L_emb are means over tokens and width. L_att is a mean over heads and over the pairs of
tokens of the same document. A score of -100 or less counts as 0 in either model, as in that code,
whose means also count padding: for rows of one document it has L_att * (pairs / (B L^2)) and
L_hid * (tokens / (B L)), plus what its padding adds, for B rows of length L.

The query and key are those that attention multiplies, so with rotary positions they are rotated. In
a model with a norm after the last layer (ModernBERT), H of that layer is taken before it, and the
student's norm stays as it was initialised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from pretrain import RunError
from pretrain.contracts.needs import Part
from pretrain.contracts.terms import Shape, Term, wide
from pretrain.objectives.finetune import TASKS
from pretrain.objectives.objective import OF_TASKS, Objective, even_layers, layer_pairs, layers_term

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pretrain.contracts.batch import Batch

_ADAPTER = "hidden"


class TinyBert(Objective):
    """Configure the weights, where 0 leaves a term out, and the teacher's layers.

    `layers` has a layer of the teacher, counted from 0, for each layer of the student. Without it
    they are evenly spaced and end with the teacher's last: 2, 5, 8, 11 for 4 layers of 12.
    """

    # The paper compares models on text without masks.
    defaults: ClassVar[Any] = OF_TASKS
    tasks: ClassVar[Any] = ("mlm", *TASKS)

    name: Literal["tinybert"] = "tinybert"
    attention: float = Field(1.0, ge=0, le=1e6)
    """Weight of attention scores, which needs as many heads as the teacher has. The authors never
    tuned the weights.
    """
    hidden: float = Field(1.0, ge=0, le=1e6)
    """Weight of the hidden states behind layers."""
    embedding: float = Field(1.0, ge=0, le=1e6)
    """Weight of the output of the embeddings."""
    layers: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """The teacher's layer, from 0, for each of the student's. None: evenly spaced up to the last:
    2, 5, 8, 11 for 4 layers of 12.
    """
    first: Literal["identity", "random"] = "identity"
    """How W begins where both widths are equal; `random` as in the authors' code."""

    @property
    def published(self) -> str:
        """Return the paper's name if this is its objective; empty for a variant."""
        paper = "TinyBERT's distillation of layers, arXiv 1909.10351"
        return paper if self in (TinyBert(), TinyBert(first="random")) else ""

    @property
    def parts(self) -> tuple[Part, ...]:
        """Return the terms with a weight above 0."""
        squares = "mean squared difference of the attention scores"
        found = (
            Part("attention", self.attention, squares, "pairs", ("layers",), sums=True),
            Part("hidden", self.hidden, "that of the hidden states", reads=("layers",), sums=True),
            Part("embedding", self.embedding, "that of the embeddings", reads=("layers",)),
        )
        return tuple(part for part in found if part.weight > 0)

    @property
    def sentence(self) -> str:
        """Return the terms, their weights and the map of layers, for the model card."""
        listed = ", ".join(map(str, self.layers or ()))
        layers = f"layers {listed}" if listed else "evenly spaced layers"
        return f"{super().sentence}, with {layers} of the teacher"

    def layer_map(self, student: Shape, teacher: Shape) -> tuple[tuple[int, int], ...]:
        """Return each layer of the student with the teacher's layer that it learns from.

        Raises:
            RunError: they are not evenly spaced, or `layers` does not fit the models.
        """
        ours, theirs = student.num_layers, teacher.num_layers
        layers = self.layers
        if layers is None:
            instead = f"list {ours} layers of the teacher, or set student.num_layers to a divisor"
            layers = even_layers(ours, theirs, "objective.layers is missing", instead)
        return layer_pairs(layers, ours, teacher)

    def adapters(self, student: Shape, teacher: Shape | None) -> nn.ModuleDict:
        """Return the linear layer from the student's width to the teacher's."""
        from torch import nn

        assert teacher is not None
        # Attention scores have no width. Without a term it would be frozen, and saved for nothing.
        if self.hidden == self.embedding == 0:
            return nn.ModuleDict()
        return nn.ModuleDict({_ADAPTER: nn.Linear(student.hidden_size, teacher.hidden_size)})

    def begin(self, adapters: nn.ModuleDict) -> None:
        """Let W be the identity where both widths are equal."""
        from torch import nn

        if _ADAPTER not in adapters or self.first != "identity":
            return
        found = adapters[_ADAPTER]
        assert isinstance(found, nn.Linear)
        if found.in_features == found.out_features:
            nn.init.eye_(found.weight)

    def check(self, student: Shape, teacher: Shape) -> None:
        """Refuse depths that have no map, and another number of heads where scores are compared."""
        self.layer_map(student, teacher)
        if self.attention > 0 and student.num_heads != teacher.num_heads:
            raise RunError(
                f"objective.attention {self.attention:g}: compares the scores of each head, and "
                f"the student has {student.num_heads} heads, the teacher {teacher.num_heads}; set "
                f"student.num_attention_heads: {teacher.num_heads}, or objective.attention: 0"
            )

    def terms(self, student: Shape, teacher: Shape | None) -> tuple[Term, ...]:
        """Return the terms with a weight above 0."""
        from pretrain.kernels.relations import score_difference

        assert teacher is not None
        layers = self.layer_map(student, teacher)

        def scored(batch: Batch, _: nn.ModuleDict, *qk: Tensor) -> Tensor:
            return score_difference(qk[:2], qk[2:], batch.documents, teacher.num_heads)

        # The authors' code has both terms in one list, of which the embeddings are entry 0.
        found = (
            layers_term("attention", self.attention, "pairs", layers, scored, ("query", "key")),
            layers_term("hidden", self.hidden, "tokens", layers, adapted_squares),
            layers_term("embedding", self.embedding, "tokens", [(-1, -1)], adapted_squares),
        )
        weights = self.attention, self.hidden, self.embedding
        # A term of weight 0 would cost its whole computation and change nothing.
        return tuple(term for term, weight in zip(found, weights, strict=True) if weight > 0)


def adapted_squares(
    batch: Batch, adapters: nn.ModuleDict, student_BLD: Tensor, teacher_BLD: Tensor
) -> Tensor:
    """Compute the sum over tokens of the mean over the width of (W H + b - H')^2."""
    adapted_BLD = adapters[_ADAPTER](student_BLD)
    squares_BL = (wide(adapted_BLD) - wide(teacher_BLD)).square().mean(-1)
    return (squares_BL * batch.packing.token_mask).sum()


def scores(query_BLD: Tensor, key_BLD: Tensor, heads: int) -> Tensor:
    """Compute S = Q K^T / sqrt(d) of each head [B, A, L, L], before the softmax."""
    q_BALd, k_BALd = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (query_BLD, key_BLD))
    return q_BALd @ k_BALd.mT / q_BALd.shape[-1] ** 0.5


def squared_difference(student_BALL: Tensor, teacher_BALL: Tensor, pairs_BLL: Tensor) -> Tensor:
    """Compute the sum over pairs of (S - S')^2, the mean over heads; L_att of a layer is its mean.

    A score of -100 or less counts as 0 in either model, as in the authors' code.
    `kernels/relations` computes it from Q and K in chunks, with its gradient.

    Args:
        student_BALL, teacher_BALL: scores of both models.
        pairs_BLL: whether two positions are tokens of one document.
    """
    kept = (s.masked_fill(s <= -1e2, 0.0) for s in (student_BALL, teacher_BALL))
    squares_BLL = (next(kept) - next(kept)).square().mean(1)
    return squares_BLL.masked_fill(~pairs_BLL, 0.0).sum()
