"""Distil sentence vectors without labels, as people do with LEAF or sentence-transformers.

    L = cosine * (1 - cos(s, t)) + similarity * (cos(s_a, s_b) - cos(t_a, t_b))^2
        (+ mse * mean((s - t)^2))

s = dense(mean over a document's tokens) of the student, t = the teacher's sentence vector. The
first and the last term are means over documents, the second over pairs of documents of a row. An
example is a document of the corpus that is whole in its row; pieces of longer ones are left out.

The adapter `dense` is exported with the student, so that its vectors may be compared with the
teacher's. For equal widths none is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from pretrain import RunError
from pretrain.objectives.objective import Objective
from pretrain.objectives.shape import Shape

if TYPE_CHECKING:
    from torch import nn

    from pretrain.objectives.terms import Term


class Embedding(Objective):
    """Configure the comparison of vectors; a term of weight 0 is not computed.

    A teacher with the shards' vocabulary computes its vectors in each step; those of another one
    are in a file, see the key `vectors` of a run. With an existing file a run needs no teacher.
    """

    needs_logits: ClassVar[bool] = False
    corrupts: ClassVar[bool] = False
    compares: ClassVar[bool] = True
    compares_documents: ClassVar[bool] = True

    name: Literal["embedding"] = "embedding"
    cosine: float = Field(1.0, ge=0, le=1e6)
    similarity: float = Field(1.0, ge=0, le=1e6)  # longer rows have more pairs
    mse: float = Field(0.0, ge=0, le=1e6)  # mean over the vector; also learns its length
    adapter: Literal["auto", "linear", "none"] = "auto"  # auto: a linear one if widths differ

    @model_validator(mode="after")
    def _some_term(self) -> Embedding:
        if self.cosine == self.similarity == self.mse == 0:
            raise ValueError("cosine, similarity and mse are all 0: give a term a weight")
        return self

    @property
    def sentence(self) -> str:
        """Return the terms and their weights, for the model card."""
        texts = (
            (self.cosine, "cosine distance of the sentence vectors"),
            (self.similarity, "squared difference of the similarities of two documents of a row"),
            (self.mse, "mean squared difference of the sentence vectors"),
        )
        return " + ".join(f"{weight:g} x {text}" for weight, text in texts if weight > 0)

    def adapters(self, student: Shape, teacher: Shape | None) -> nn.ModuleDict:
        """Return the dense layer from the student's width to that of the teacher's vectors."""
        from torch import nn

        assert teacher is not None
        widths = student.hidden_size, teacher.vector_size
        if self.adapter == "none" or (self.adapter == "auto" and widths[0] == widths[1]):
            return nn.ModuleDict()
        return nn.ModuleDict({"dense": nn.Linear(*widths)})

    def check(self, student: Shape, teacher: Shape) -> None:
        """Refuse vectors of different widths without an adapter; config.json tells none (0)."""
        if self.adapter == "none" and teacher.vector_size not in (0, student.hidden_size):
            raise RunError(
                f"objective.adapter none: the student's vectors have {student.hidden_size} values "
                f"and the teacher's {teacher.vector_size}; set objective.adapter: auto, or take a "
                "student of that width"
            )

    def terms(self, student: Shape, teacher: Shape | None) -> tuple[Term, ...]:
        """Return the terms with a weight above 0."""
        assert teacher is not None
        self.check(student, teacher)
        from pretrain.objectives.terms import vectors_term

        terms = (
            (self.cosine, vectors_term("cosine", self.cosine)),
            (self.similarity, vectors_term("similarity", self.similarity)),
            (self.mse, vectors_term("mse", self.mse)),
        )
        return tuple(term for weight, term in terms if weight > 0)
