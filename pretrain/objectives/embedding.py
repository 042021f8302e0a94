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

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from pretrain import RunError
from pretrain.contracts.needs import Part
from pretrain.contracts.terms import Encoded, Shape, SignalTerm, Term, constant
from pretrain.objectives.distilbert import cosine_distance
from pretrain.objectives.objective import OF_ENCODERS, Objective

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pretrain.contracts.batch import Batch


class Embedding(Objective):
    """Configure the comparison of vectors; a term of weight 0 is not computed.

    A teacher with the shards' vocabulary computes its vectors in each step; those of another one
    are in a file, see the key `vectors` of a run. With an existing file a run needs no teacher.
    """

    tasks: ClassVar[Any] = ("embedding",)
    defaults: ClassVar[Any] = OF_ENCODERS

    name: Literal["embedding"] = "embedding"
    cosine: float = Field(1.0, ge=0, le=1e6)
    """Weight of the distance of the two vectors of a document."""
    similarity: float = Field(1.0, ge=0, le=1e6)
    """Weight of the difference of similarities between documents of a row; longer rows have more
    pairs.
    """
    mse: float = Field(0.0, ge=0, le=1e6)
    """Weight of the squared difference of vectors, which also learns their length."""
    adapter: Literal["auto", "linear", "none"] = "auto"
    """A linear layer behind the student's vector; auto: if widths differ."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """Return the terms with a weight above 0."""
        found = (
            Part("cosine", self.cosine, "cosine distance of the sentence vectors", "sequences"),
            Part(
                "similarity",
                self.similarity,
                "squared difference of the similarities of two documents of a row",
                "sequence_pairs",
            ),
            Part("mse", self.mse, "mean squared difference of the sentence vectors", "sequences"),
        )
        return tuple(part for part in found if part.weight > 0)

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
        return tuple(vectors_term(part.key, part.weight, over=part.over) for part in self.parts)


def vectors_term(name: str, weight: float, *, over: str) -> SignalTerm:
    """Return a term that compares the sentence vectors of whole documents.

    The student's vector is the mean over a document's tokens, through the adapter "dense" if there
    is one. "cosine" is 1 - cos(student, teacher), and "mse" their mean squared difference, each a
    mean over documents. "similarity" compares what a document is similar to: the squared
    difference of cos(a, b) in both models, for the pairs of documents of a row. Pairs across rows
    would make the loss depend on the size of a micro-batch.

    Args:
        name: of the formula.
        weight: of the term.
        over: what the term is a mean over.
    """
    import torch
    from torch.nn.functional import linear, normalize

    from pretrain.model.pooling import pooled

    def total(
        student: Encoded, teacher: Encoded | None, batch: Batch, adapters: nn.ModuleDict
    ) -> Tensor:
        # The teacher's vectors are there, too, whether it runs or a file holds them.
        documents_BL, lengths_BK, theirs_BKW = (
            batch.labels[name] for name in ("documents", "lengths", "vectors")
        )
        ours_BKW = pooled(student.last_hidden_state, documents_BL, lengths_BK)
        with torch.autocast(ours_BKW.device.type, enabled=False):
            if "dense" in adapters:
                dense: Any = adapters["dense"]
                matrix_WD, bias_W = (t.to(ours_BKW.dtype) for t in (dense.weight, dense.bias))
                ours_BKW = linear(ours_BKW, matrix_WD, bias_W)
            theirs_BKW = theirs_BKW.to(ours_BKW.dtype)
            there_BK = lengths_BK > 0
            if name == "cosine":
                return (cosine_distance(ours_BKW, theirs_BKW) * there_BK).sum()
            if name == "mse":
                return ((ours_BKW - theirs_BKW).square().mean(-1) * there_BK).sum()
            # Small: K is the number of documents of one row.
            units = (normalize(vectors, dim=-1) for vectors in (ours_BKW, theirs_BKW))
            ours_BKK, theirs_BKK = (unit @ unit.mT for unit in units)
            # A document is as similar to itself in every model.
            pairs_BKK = (there_BK[:, :, None] & there_BK[:, None]).float().triu(1) * 2
            return ((ours_BKK - theirs_BKK).square() * pairs_BKK).sum()

    return SignalTerm(name, constant(weight), over, total, True)
