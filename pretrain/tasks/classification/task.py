"""Classify texts or pairs of texts, or give them a score: GLUE's tasks, rankers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from pretrain.tasks.labelled_task import LabelledTask

if TYPE_CHECKING:
    from data_prep.shards import Manifest
    from pretrain.config import RunConfig
    from pretrain.tasks.transfer import Transfer


class Classification(LabelledTask):
    """Predict a class or a score of each row; shards of scores make a head with one output."""

    kinds: ClassVar[Any] = ("classification", "regression")
    pipeline: ClassVar[str] = "text-classification"

    name: Literal["classification"] = "classification"
    masked: float = Field(0.0, ge=0, lt=1)
    """Share of a training text's words that become [MASK], for a student that learns only from its
    teacher.
    """
    ngrams: float = Field(0.0, ge=0, le=1)
    """Share of such examples that keep a few words."""

    def check(self, config: RunConfig) -> None:
        """Refuse changed texts that no teacher reads."""
        super().check(config)
        if self.masked == self.ngrams == 0:
            return
        name, objective = config.objective.name, config.objective
        if config.teacher is None or not objective.compares:
            raise ValueError(
                f"task.masked and task.ngrams change texts, whose labels a teacher must tell: name "
                f"`teacher:`, and an objective that compares with it (here {name})"
            )
        if self.logits is not None:
            raise ValueError("task.logits are those of texts that do not change: remove the key")

    def transfer(self, shards: Path, manifest: Manifest, seed: int) -> Transfer | None:
        """Return what changes the texts of training examples; RunError if words are not known."""
        if self.masked == self.ngrams == 0:
            return None
        from pretrain.tasks.mlm.examples import special_tokens, words_of
        from pretrain.tasks.transfer import Transfer

        words = words_of(shards, manifest, "task.masked", "remove it and task.ngrams")
        special = special_tokens(manifest, len(words.goes_on))
        ids = manifest.tokenizer.special_ids
        frame = (ids.cls, ids.sep, ids.pad)
        return Transfer(self.masked, self.ngrams, seed, words, special, ids.mask, ids.pad, frame)


TASK = Classification
