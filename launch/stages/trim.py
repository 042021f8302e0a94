"""Trim: write a model with the tokens that a corpus uses."""

from __future__ import annotations

from collections.abc import Callable

from data_prep.shards import load_manifest
from launch.recipe_config import TrimKeys
from launch.stages.smaller import Smaller
from launch.stages.stage import How, Made, real
from pretrain import RunError
from pretrain.plan import Sizes


class Trim(Smaller):
    """Trim a vocabulary."""

    keys = TrimKeys
    name = "trim"

    @property
    def title(self) -> str:
        """Return which model it trims."""
        return f"vocabulary of {self.config.model}"

    def check(self, made: Made, how: How, *, dry_run: bool) -> tuple[Made, list[str]]:
        """Refuse a task's examples, too."""
        shards = self.config.shards
        if real(shards) not in made and load_manifest(shards).kind:
            raise RunError(f"shards {shards}: hold a task's examples; give a corpus")
        return super().check(made, how, dry_run=dry_run)

    def plan(self, sizes: Sizes | None) -> tuple[Sizes | None, list[str]]:
        """Return the sizes of the model, whose layers stay, and which tokens stay."""
        config = self.config
        wanted = f"{config.size:,} tokens" if config.size else f"used {config.min_count} times"
        return sizes, [f"tokens of {config.shards}: {wanted}"]

    def writer(self) -> Callable[..., None]:
        """Return `trim`."""
        from pretrain.export.trimming import trim

        return trim
