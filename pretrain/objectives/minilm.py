"""Define MiniLM version 2 (Wang et al. 2021, arXiv 2012.15828) and 1 (2020, arXiv 2002.10957).

    version 2:  L = KL(R_QQ) + KL(R_KK) + KL(R_VV)
    version 1:  L = KL(R_QK) + KL(R_VV),   R_XY = softmax(X Y^T / sqrt(d)) of each relation head

X is the query, key or value of one layer of the teacher and of the student's last layer. All heads
side by side are split again into `relation_heads`, so widths and attention heads may differ.
Version 1 compares the attention of each head, so both models need as many. Each KL is a mean over
tokens and heads, between the tokens of a document.

Nothing after the values of the student's last layer gets a gradient: neither the rest of that layer
nor the LM head. They are trained with a downstream task.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from pretrain import RunError
from pretrain.contracts.needs import Part
from pretrain.contracts.terms import (
    Kind,
    Shape,
    Term,
)
from pretrain.objectives.objective import OF_ENCODERS, Objective, layers_term

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pretrain.contracts.batch import Batch


_HEADS = 48
_VERSION_2: dict[str, Kind] = {"queries": "query", "keys": "key", "values": "value"}


class MiniLM(Objective):
    """Configure the relations; `teacher_layer` counts from 0, and from the end if negative.

    `relation_heads` is for version 2; version 1 takes the attention heads.
    """

    # The paper compares models on text without masks.
    defaults: ClassVar[Any] = OF_ENCODERS

    name: Literal["minilm"] = "minilm"
    version: Literal[1, 2] = 2
    """1 compares attention and values of the last layer, 2 queries, keys and values in more heads.
    """
    relation_heads: int | None = Field(None, ge=1, le=2**10)
    """Of version 2. None: 48, the paper's for a teacher of width 768, or the next less that divides
    both widths.
    """
    teacher_layer: int = -1
    """From 0, or from the end if negative; the paper takes a layer before the last one of teachers
    of 24 layers.
    """

    @model_validator(mode="after")
    def heads_are_used(self) -> MiniLM:
        """Refuse a number of heads that version 1 would ignore."""
        if self.version == 1 and self.relation_heads is not None:
            raise ValueError("relation_heads is for version 2; version 1 takes the attention heads")
        return self

    @property
    def parts(self) -> tuple[Part, ...]:
        """Return a term for each relation, with weight 1."""
        return tuple(Part("", 1.0, f"KL of the {name}") for name in self._relations)

    def relation_heads_of(self, num_heads: int) -> int:
        """Return the relation heads; the most where a config names none."""
        return num_heads if self.version == 1 else self.relation_heads or _HEADS

    @property
    def _relations(self) -> dict[str, tuple[Kind, Kind]]:
        if self.version == 1:
            return {"attention": ("query", "key"), "values": ("value", "value")}
        return {name: (kind, kind) for name, kind in _VERSION_2.items()}

    @property
    def published(self) -> str:
        """Return the paper's name."""
        number = {1: "2002.10957", 2: "2012.15828"}[self.version]
        return f"the objective of MiniLM v{self.version}, arXiv {number}"

    @property
    def sentence(self) -> str:
        """Return the terms, for the model card."""
        what = "attention and of the value relations of each head"
        if self.version == 2:
            heads = f"{self.relation_heads} heads" if self.relation_heads else "at most 48 heads"
            what = f"query, key and value relations of {heads}"
        return f"KL(teacher || student) of the {what}, at layer {self.teacher_layer} of the teacher"

    def num_heads(self, student: Shape, teacher: Shape) -> int:
        """Return the number of relation heads: of version 1 the teacher's attention heads.

        Without `relation_heads` they are the most, up to 48, that divide both widths.
        """
        if self.version == 1:
            return teacher.num_heads
        if self.relation_heads is not None:
            return self.relation_heads
        both = math.gcd(student.hidden_size, teacher.hidden_size)
        return next(heads for heads in range(_HEADS, 0, -1) if both % heads == 0)

    def check(self, student: Shape, teacher: Shape) -> None:
        """Refuse a layer that the teacher lacks, and heads that do not divide both widths."""
        if not -teacher.num_layers <= self.teacher_layer < teacher.num_layers:
            raise RunError(
                f"objective.teacher_layer {self.teacher_layer}: the teacher has layers 0 to "
                f"{teacher.num_layers - 1}, or -1 for the last one"
            )
        heads = self.num_heads(student, teacher)
        if self.version == 1 and student.num_heads != heads:
            raise RunError(
                f"objective.version 1: compares attention heads, and the student has "
                f"{student.num_heads}, the teacher {heads}; set student.num_attention_heads: "
                f"{heads}, or objective.version: 2"
            )
        both = math.gcd(student.hidden_size, teacher.hidden_size)
        for who, shape in (("student", student), ("teacher", teacher)):
            if shape.hidden_size % heads:
                divisors = [str(n) for n in range(1, both + 1) if both % n == 0 and n <= 2 * _HEADS]
                raise RunError(
                    f"objective.relation_heads {heads}: does not divide the {who}'s "
                    f"width {shape.hidden_size}; take a divisor of both widths, "
                    + " or ".join(", ".join(divisors[-3:]).rsplit(", ", 1))
                )

    def terms(self, student: Shape, teacher: Shape | None) -> tuple[Term, ...]:
        """Return a term for each relation, with weight 1."""
        from pretrain.kernels.relations import relation_divergence

        assert teacher is not None
        heads = self.num_heads(student, teacher)
        ours, theirs = student.num_layers - 1, self.teacher_layer % teacher.num_layers

        def diverged(batch: Batch, _: nn.ModuleDict, *xy: Tensor) -> Tensor:
            return relation_divergence(xy[:2], xy[2:], batch.documents, heads)

        return tuple(
            layers_term(name, 1.0, "tokens", [(ours, theirs)], diverged, kinds)
            for name, kinds in self._relations.items()
        )


def relation(x_BLD: Tensor, y_BLD: Tensor, same_BLL: Tensor, heads: int) -> Tensor:
    """Compute R = softmax(X Y^T / sqrt(d)) of each relation head [B, A, L, L].

    Args:
        x_BLD, y_BLD: the tensors that are related, with all heads side by side.
        same_BLL: whether two positions are in one document; a row's padding counts as one.
        heads: relation heads, which divide the width.
    """
    import torch

    x_BALd, y_BALd = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (x_BLD, y_BLD))
    scores = x_BALd @ y_BALd.mT / x_BALd.shape[-1] ** 0.5
    scores = scores.masked_fill(~same_BLL[:, None], -math.inf)
    return scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))


def divergence(student_BALL: Tensor, teacher_BALL: Tensor, tokens_BL: Tensor) -> Tensor:
    """Compute the sum over tokens of KL(teacher || student), the mean over heads, of relations.

    `kernels/relations` computes it from X and Y in chunks, with its gradient.
    """
    import torch

    # Tokens of two documents have the relation 0 in both models, and no logarithm.
    tiny = torch.finfo(teacher_BALL.dtype).tiny
    logs = teacher_BALL.clamp_min(tiny).log() - student_BALL.clamp_min(tiny).log()
    return ((teacher_BALL * logs).sum(-1).mean(1) * tokens_BL).sum()
