"""Classify documents: is one longer than 12 tokens? A task in one folder, for test_toy_task.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from pretrain.contracts.needs import Part
from pretrain.contracts.terms import Encoded, Shape, SignalTerm, Term, constant
from pretrain.objectives.objective import Objective
from pretrain.tasks.task import Examples, Measure, Start, Task, own_terms

if TYPE_CHECKING:
    from torch import Tensor, nn

    from data_prep.shards import Manifest, ShardSet
    from pretrain.contracts.batch import Batch, Rows
    from pretrain.model.families import MaskedLM

LONG = 12  # tokens


class Labels(Objective):
    """Learn the labels of documents."""

    tasks: ClassVar = ("toy",)
    needs_teacher: ClassVar[bool] = False
    parts: ClassVar = (
        Part("", 1.0, "cross-entropy of the labels", "documents", ("labels",), teacher=False),
    )

    name: Literal["labels"] = "labels"

    def terms(self, student: Shape, teacher: Shape | None) -> tuple[Term, ...]:
        """Return the cross-entropy of a classifier on the first token of each document."""
        from torch.nn.functional import cross_entropy

        def total(
            ours: Encoded, theirs: Encoded | None, batch: Batch, adapters: nn.ModuleDict
        ) -> Tensor:
            logits_BLC = adapters["classifier"](ours.last_hidden_state).float()
            labels_BL = batch.labels["class"].long()
            return cross_entropy(logits_BLC.flatten(0, 1), labels_BL.flatten(), reduction="sum")

        return (SignalTerm("classes", constant(1.0), "documents", total, False),)


class Toy(Task):
    """Give each document the label 1 if it is long."""

    counts: ClassVar = ("tokens", "documents")
    objectives: ClassVar = (Labels,)

    name: Literal["toy"] = "toy"

    def attach(self, student: MaskedLM, manifest: Manifest) -> nn.ModuleDict:
        """Return the classifier."""
        from torch import nn

        return nn.ModuleDict({"classifier": nn.Linear(student.config.hidden_size, 2)})

    def examples(self, start: Start) -> Examples:
        """Return the documents of the training split."""
        from data_prep.shards import open_shards

        return Documents(open_shards(start.config.shards))

    def measure(
        self, examples: Examples, validation: ShardSet, terms: Sequence[Term], *, teacher: bool
    ) -> Measure:
        """Measure the cross-entropy."""
        return own_terms(Documents(validation), terms, self.counts)

    def export(
        self, folder: Path, width: int, state: Mapping[str, Any], modules: Mapping[str, Tensor]
    ) -> None:
        """Write the classifier."""
        from safetensors.torch import save_file

        save_file(dict(modules), folder / "classifier.safetensors")


class Documents(Examples):
    """Label documents at their first token."""

    def rows(self, ids: Any, epochs: Any, numbers: Any, step: int = 0, skipped: Any = None) -> Rows:
        """Return rows with "class" [R, L]: the label at a document's [CLS], elsewhere -100."""
        import torch

        if skipped is not None:
            ids[skipped] = self.special.pad
        labels = np.full(ids.shape, -100, dtype=np.int16)
        for row, line in enumerate(ids):
            begins = np.flatnonzero(line == self.special.cls)
            ends = [*begins[1:], np.count_nonzero(line != self.special.pad)]
            labels[row, begins] = np.subtract(ends, begins) > LONG
        return {"input_ids": torch.from_numpy(ids), "class": torch.from_numpy(labels)}

    def batch(self, rows: Rows) -> Batch:
        """Return a micro-batch with the count "documents"."""
        from pretrain.contracts.batch import packed_batch

        counts = {"documents": int((rows["class"] >= 0).sum())}
        ids, labels = rows["input_ids"], {"class": rows["class"]}
        return packed_batch(ids, labels, counts, cls_id=self.special.cls, pad_id=self.special.pad)

    def fullest(self, ids: Any, numbers: Any, token: int) -> Batch:
        """Return the rows as a micro-batch."""
        return self.batch(self.rows(ids, None, numbers))
