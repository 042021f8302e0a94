"""Augment: write more texts like the training examples of a task."""

from __future__ import annotations

import json
from typing import Any

from data_prep.disk import hash_file, write_file
from data_prep.examples.labelled_files import AUGMENTED, TEXTS
from data_prep.shards import load_manifest
from launch.commands import quiet
from launch.console import show
from launch.recipe_config import AugmentKeys
from launch.stages.stage import Compared, How, Made, names_in, not_ours, real, version_of
from pretrain import RunError
from pretrain.exit_codes import ExitCode
from pretrain.files import replace_json
from pretrain.plan import Planned

CODE = 1  # raised when the same inputs would give other texts


class Augment(Compared):
    """Write the texts, unless the same were written before."""

    keys = AugmentKeys
    flop = None  # of the masked language model: a pass for each word

    @property
    def title(self) -> str:
        """Return how many copies it makes."""
        return f"{self.config.copies} more texts for each example"

    def reads(self) -> dict[str, str]:
        """Return the shards and the masked language model."""
        return {"shards": str(self.config.shards), "words": self.config.words}

    def check(self, made: Made, how: How, *, dry_run: bool) -> tuple[Made, list[str]]:
        """Check where the texts go, and that the shards are there or will be."""
        config = self.config
        for name in names_in(config.output):
            if name not in (AUGMENTED, TEXTS):
                raise not_ours(config.output, name, "stage augment")
        there = made.get(real(config.shards))
        if real(config.shards) not in made:
            manifest = load_manifest(config.shards)
            if manifest.kind not in ("classification", "regression"):
                raise RunError(
                    f"shards {config.shards}: holds {manifest.kind or 'a corpus'}, and augment "
                    "changes the texts of classification and regression"
                )
            split = manifest.splits["train"]
            there = Planned(split.rows, split.tokens, manifest.row_length, 0)
        rows = None
        if isinstance(there, Planned):
            more = config.copies
            rows = there._replace(rows=more * there.rows, tokens=more * there.tokens)
        lines = [f"texts like those of {config.shards}"]
        return {real(config.output): rows}, lines

    def is_kept(self) -> bool:
        """Return whether the texts of these very inputs are there."""
        return self._kept() == self._identity()

    def run(self, how: How) -> int:
        """Write the texts, and what they were made of."""
        config, identity = self.config, self._identity()
        file = config.output / TEXTS
        if self._kept() == identity:
            show(f"{file}: up to date")
            return ExitCode.DONE
        from pretrain.tasks.augmentation import Augmentation, augmented

        quiet()
        settings = Augmentation(*(getattr(config, name) for name in Augmentation._fields))
        config.output.mkdir(parents=True, exist_ok=True)
        (config.output / AUGMENTED).unlink(missing_ok=True)
        texts = augmented(config.shards, config.words, settings, show)
        lines = (json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in texts)
        write_file(file, lambda out: out.writelines(lines))
        kept = {"inputs": identity, "sha256": hash_file(file)[0]}
        replace_json(config.output / AUGMENTED, kept)
        with file.open("rb") as found:
            show(f"{file}: {sum(1 for _ in found):,} texts")
        return ExitCode.DONE

    def _kept(self) -> Any:
        """Return what the texts were made of; None if they are missing or were changed."""
        try:
            kept = json.loads((self.config.output / AUGMENTED).read_bytes())
            same = kept["sha256"] == hash_file(self.config.output / TEXTS)[0]
            return kept["inputs"] if same and kept["inputs"]["words"][1] else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _identity(self) -> dict[str, Any]:
        """Return what shapes the texts; a hub's model is known by its commit alone."""
        config = self.config
        return {
            "shards": load_manifest(config.shards).digest,
            "words": [config.words, version_of(config.words)],
            "settings": config.model_dump(mode="json", exclude={"output", "shards", "words"}),
            "code": CODE,
        }
