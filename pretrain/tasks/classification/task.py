"""Classify texts or pairs of texts, or give them a score: GLUE's tasks, rankers."""

from __future__ import annotations

from typing import ClassVar, Literal

from pretrain.tasks.labelled_task import LabelledTask


class Classification(LabelledTask):
    """Predict a class or a score of each row; shards of scores make a head with one output."""

    kinds: ClassVar = ("classification", "regression")
    pipeline: ClassVar[str] = "text-classification"

    name: Literal["classification"] = "classification"


TASK = Classification
