"""Configure the task of sentence vectors: an example is a document that is whole in its row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pretrain.contracts.terms import TeacherLabels, Term
from pretrain.objectives.objective import Objective
from pretrain.tasks.task import Examples, Measure, Start, Task, Use, own_terms

if TYPE_CHECKING:
    from torch import Tensor

    from data_prep.shards import ShardSet
    from pretrain.config import RunConfig
    from pretrain.contracts.batch import Batch


class SentenceVectors(Task):
    """Compare vectors of documents with a teacher's, or with those of a file.

    A document that was cut to fit rows is left out: its vector would be that of another text.
    """

    sentence_encoder: ClassVar[bool] = True
    counts: ClassVar[Any] = ("tokens", "sequences", "sequence_pairs")

    name: Literal["embedding"] = "embedding"

    @classmethod
    def unread(cls, objective: type[Objective] | Objective) -> dict[str, str]:
        """Return nothing: a run may have a teacher or a file, and the student's own sizes."""
        return {}

    def check(self, config: RunConfig) -> None:
        """Refuse a run without teacher and vectors, and one with two students or none."""
        if config.teacher is None and config.vectors is None:
            name = config.objective.name
            raise ValueError(f"objective {name} needs `teacher:`, a folder or a hub name")
        if config.model is not None and config.student != type(config.student)():
            raise ValueError("the student is that of `model:`: remove one of the two sections")
        if config.teacher is None and config.model is None:
            raise ValueError("without `teacher:` the student is that of `model:`: add it")

    def examples(self, start: Start) -> Examples:
        """Return the documents of the training split."""
        from pretrain.tasks.embedding.examples import find_vectors
        from pretrain.tasks.mlm.examples import build_masking

        config, manifest = start.config, start.manifest
        masking = build_masking(
            config.masking, config.shards, manifest, config.train.seed, start.num_steps
        )
        return find_vectors(
            config, manifest, start.teacher, masking, start.notes, whole=start.whole
        )

    def measure(
        self, examples: Examples, validation: ShardSet, terms: Sequence[Term], *, teacher: bool
    ) -> Measure:
        """Measure the terms on documents of the validation split, without masks."""
        from pretrain.tasks.embedding.documents import Documents
        from pretrain.tasks.embedding.examples import WholeDocuments
        from pretrain.tasks.mlm.examples import evaluation_masking

        assert isinstance(examples, WholeDocuments)
        documents = Documents(validation, examples.documents.path)
        masking = evaluation_masking(validation.manifest, 0.0)
        # Packing puts the longest documents first, most of which were cut: rows are taken evenly.
        found = WholeDocuments(validation, documents, masking)
        return own_terms(found, terms, self.counts, spread=True)

    def use(self, objective: Objective) -> Use:
        """Return the use of a sentence encoder."""
        code = "from sentence_transformers import SentenceTransformer\n\n"
        code += 'vectors = SentenceTransformer("PATH_OR_NAME").encode(["A text.", "Another."])'
        return Use("sentence-transformers", "sentence-similarity", code)

    def export(
        self,
        folder: Path,
        width: int,
        state: Mapping[str, Any],
        modules: Mapping[str, Tensor],
    ) -> None:
        """Write the modules that sentence-transformers reads."""
        from pretrain.tasks.embedding.modules import write_modules

        write_modules(
            folder,
            width=width,
            longest=state["row_length"],
            adapters=modules,
            normalised=state["vectors"]["normalised"],
        )

    def drawn(self, batch: Batch, width: int, *, pad_id: int) -> tuple[Batch, TeacherLabels | None]:
        """Return a batch of whole documents, and the mean over the tokens of each."""
        from pretrain.model.pooling import SentenceHead
        from pretrain.tasks.embedding.examples import drawn_documents, vectors_by

        return drawn_documents(batch, pad_id=pad_id), vectors_by(SentenceHead(width))
