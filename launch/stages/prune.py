"""Prune: write a model with its most important heads and neurons."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from data_prep.shards import Manifest, load_manifest
from launch.stage_keys import PruneKeys
from launch.stages.stage import How, Made, real
from launch.stages.written import Written
from pretrain import RunError
from pretrain.plan import Planned, Sizes


class Prune(Written):
    """Prune heads and neurons."""

    keys = PruneKeys
    name, record = "prune", "prune.json"
    places: ClassVar[Any] = Written.places | {"multiple_of"}

    @property
    def title(self) -> str:
        """Return which model it prunes."""
        return f"heads and neurons of {self.config.model}"

    def check(self, made: Made, how: How, *, dry_run: bool) -> tuple[Made, list[str]]:
        """Also refuse a model without a head for the shards, if both exist."""
        found = super().check(made, how, dry_run=dry_run)
        folder, shards = Path(self.config.model), self.config.shards
        if not {real(folder), real(shards)} & made.keys() and (folder / "config.json").is_file():
            from pretrain.shrink.prune import check_kind

            check_kind(self.config.model, folder, load_manifest(shards), shards)
        return found

    def plan(
        self, model: Sizes | None, shards: Manifest | Planned | None
    ) -> tuple[Sizes | None, list[str]]:
        """Return the sizes of the new model, and what a class of transformers loads of them."""
        sizes = model
        heads, neurons = self.config.heads, self.config.intermediate_size
        lines = []
        if sizes is not None:
            self._check(sizes)
        if neurons is not None:
            old = f"{sizes.intermediate_size:,} -> " if sizes else ""
            lines += [f"{old}{neurons:,} neurons in each layer: a smaller folder"]
            sizes = sizes and sizes._replace(intermediate_size=neurons)
        if heads is not None:
            old = f"{sizes.num_attention_heads} -> " if sizes else ""
            lines += [
                f"{old}{heads} heads in a layer: zeros in the folder, as no class loads fewer; "
                "left out by an export with ONNX"
            ]
        return sizes, lines

    def _check(self, sizes: Sizes) -> None:
        model, config = self.config.model, self.config
        if sizes.family == "bilstm":
            raise RunError(f"model {model}: a bilstm has no heads, and no feed-forward part")
        for key, of in (
            ("heads", sizes.num_attention_heads),
            ("intermediate_size", sizes.intermediate_size),
        ):
            if (getattr(config, key) or 0) > of:
                raise RunError(f"{key} {getattr(config, key):,}: {model} has {of:,}")
        asked = config.heads or sizes.num_attention_heads, config.intermediate_size
        if asked[0] == sizes.num_attention_heads and asked[1] in (None, sizes.intermediate_size):
            raise RunError(f"nothing would go: {model} has so many heads and neurons")

    def writer(self) -> Callable[..., None]:
        """Return `prune`."""
        from pretrain.shrink.prune import prune

        return prune
