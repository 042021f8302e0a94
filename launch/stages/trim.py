"""Trim: write a model with the tokens that a corpus uses."""

from __future__ import annotations

from collections.abc import Callable

from data_prep.shards import Manifest
from launch.stage_keys import TrimKeys
from launch.stages.written import Written
from pretrain import RunError
from pretrain.plan import Planned, Sizes


class Trim(Written):
    """Trim a vocabulary."""

    keys = TrimKeys
    name, record = "trim", "trim.json"

    @property
    def title(self) -> str:
        """Return which model it trims."""
        return f"vocabulary of {self.config.model}"

    def plan(
        self, model: Sizes | None, shards: Manifest | Planned | None
    ) -> tuple[Sizes | None, list[str]]:
        """Return the sizes of the model, whose layers stay, and which tokens stay."""
        config = self.config
        if isinstance(shards, Manifest) and shards.kind:
            raise RunError(f"shards {config.shards}: hold a task's examples; give a corpus")
        wanted = f"{config.size:,} tokens" if config.size else f"used {config.min_count} times"
        return model, [f"tokens of {config.shards}: {wanted}"]

    def writer(self) -> Callable[..., None]:
        """Return `trim`."""
        from pretrain.shrink.trim import trim

        return trim
