"""Tag words, each at its first piece: names, parts of speech."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pretrain.tasks.labelled_task import LabelledTask


class TokenClassification(LabelledTask):
    """Predict a tag of each word."""

    kinds: ClassVar[Any] = ("token_classification",)
    pipeline: ClassVar[str] = "token-classification"

    name: Literal["token_classification"] = "token_classification"


TASK = TokenClassification
