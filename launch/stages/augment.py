"""Augment: write more texts like the training examples of a task."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from data_prep.disk import write_file
from data_prep.examples.labelled_files import AUGMENTED, TEXTS
from data_prep.shards import Manifest
from launch.stage_keys import AugmentKeys
from launch.stages.written import Written
from pretrain import RunError
from pretrain.plan import Planned, Sizes


class Augment(Written):
    """Write more texts."""

    keys = AugmentKeys
    name, record = "augment", AUGMENTED
    model = "words"
    flop = None  # of the masked language model: a pass for each word

    @property
    def title(self) -> str:
        """Return how many copies it makes."""
        return f"{self.config.copies} more texts for each example"

    def plan(
        self, model: Sizes | None, shards: Manifest | Planned | None
    ) -> tuple[Planned | None, list[str]]:
        """Return the rows of the new texts; refuse shards of a different kind."""
        config, there = self.config, shards
        if isinstance(there, Manifest):
            if there.kind not in ("classification", "regression"):
                raise RunError(
                    f"shards {config.shards}: holds {there.kind or 'a corpus'}, and augment "
                    "changes the texts of classification and regression"
                )
            split = there.splits["train"]
            there = Planned(split.rows, split.tokens, there.row_length, 0)
        rows, more = there, config.copies
        if rows is not None:
            rows = rows._replace(rows=more * rows.rows, tokens=more * rows.tokens)
        return rows, [f"texts like those of {config.shards}"]

    def writer(self) -> Callable[..., None]:
        """Return what writes the texts."""
        from pretrain.tasks.augmentation import Augmentation, augmented

        def write(words: str, shards: Path, folder: Path, *, say: Any, **settings: Any) -> None:
            records, num = augmented(shards, words, Augmentation(**settings), say), 0

            def lines() -> Iterator[bytes]:
                nonlocal num
                for num, record in enumerate(records, 1):  # noqa: B007
                    yield json.dumps(record, ensure_ascii=False).encode() + b"\n"

            folder.mkdir(parents=True)
            write_file(folder / TEXTS, lambda out: out.writelines(lines()))
            say(f"{num:,} texts")

        return write
