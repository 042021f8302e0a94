"""Define MiniLM version 2 (Wang et al. 2021, arXiv 2012.15828, section 3).

    L = KL(R_QQ) + KL(R_KK) + KL(R_VV),   R_XX = softmax(X X^T / sqrt(d)) of each relation head

X is the query, key or value of one layer of the teacher and of the student's last layer. All heads
side by side are split again into `relation_heads`, so widths and attention heads may differ. Each
KL is a mean over tokens and relation heads, between the tokens of a document.

Nothing after the values of the student's last layer gets a gradient: neither the rest of that layer
nor the LM head. They are trained with a downstream task.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from pretrain import RunError
from pretrain.objectives.objective import Objective

if TYPE_CHECKING:
    from pretrain.objectives.terms import Kind, Shape, Term


class MiniLM(Objective):
    """Configure the relations; `teacher_layer` counts from 0, and from the end if negative."""

    needs_logits: ClassVar[bool] = False
    corrupts: ClassVar[bool] = False  # the paper compares models on text without masks
    published: ClassVar[str] = "the objective of MiniLM v2, arXiv 2012.15828"

    name: Literal["minilm"] = "minilm"
    relation_heads: int = Field(48, ge=1, le=2**10)  # the paper's for a teacher of width 768
    teacher_layer: int = -1  # the paper takes a layer before the last one of teachers of 24 layers

    @property
    def sentence(self) -> str:
        """Return the terms, for the model card."""
        return (
            "KL(teacher || student) of the query, key and value relations of "
            f"{self.relation_heads} heads, at layer {self.teacher_layer} of the teacher"
        )

    def terms(self, student: Shape, teacher: Shape | None) -> tuple[Term, ...]:
        """Return a term for each of query, key and value, with weight 1."""
        assert teacher is not None
        if not -teacher.num_layers <= self.teacher_layer < teacher.num_layers:
            raise RunError(
                f"objective.teacher_layer {self.teacher_layer}: the teacher has layers 0 to "
                f"{teacher.num_layers - 1}, or -1 for the last one"
            )
        for who, shape in (("student", student), ("teacher", teacher)):
            if shape.hidden_size % self.relation_heads:
                raise RunError(
                    f"objective.relation_heads {self.relation_heads}: does not divide the {who}'s "
                    f"width {shape.hidden_size}; take a divisor of both widths"
                )
        from pretrain.objectives.terms import Signal, relation_term

        kinds: dict[str, Kind] = {"queries": "query", "keys": "key", "values": "value"}
        layers = student.num_layers - 1, self.teacher_layer % teacher.num_layers
        return tuple(
            relation_term(
                name,
                heads=self.relation_heads,
                # A relation of X with itself. Two different signals would do as well.
                student=(Signal(kind, layers[0]),) * 2,
                teacher=(Signal(kind, layers[1]),) * 2,
            )
            for name, kind in kinds.items()
        )
