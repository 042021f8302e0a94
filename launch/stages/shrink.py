"""Write a smaller model from a model and shards, once: with fewer tokens, or heads and neurons."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from data_prep.disk.made import CARD, UNKNOWN
from data_prep.shards import Manifest, load_manifest
from launch.console import show
from launch.stage_keys import PruneKeys, TrimKeys
from launch.stages.stage import Compared, How, Made, real, version_of
from pretrain import RunError
from pretrain.contracts.terms import Sizes
from pretrain.model.architectures import architecture_of
from pretrain.plan import Planned
from pretrain.run_folder import check_model


class Written(Compared):
    """Write the folder, unless the same was written before.

    All keys of the config shape it, but those of `places`.
    """

    others = (CARD,)
    places: ClassVar[set[str]] = {"stage", "output", "shards"}

    @abstractmethod
    def writer(self) -> Callable[..., None]:
        """Return what writes the folder, given model, shards, folder, the other keys and `say`."""

    @abstractmethod
    def plan(
        self, model: Sizes | None, shards: Manifest | Planned | None
    ) -> tuple[Sizes | Planned | None, list[str]]:
        """Return what the folder will hold, and lines of `--dry-run`.

        Args:
            model: its sizes, where they are known.
            shards: their manifest, or what is known of those of an earlier stage.

        Raises:
            RunError: they do not fit; names the key.
        """

    def reads(self) -> dict[str, str]:
        """Return the model and the shards."""
        return {"model": self.config.model, "shards": str(self.config.shards)}

    def check(self, made: Made, how: How, *, dry_run: bool) -> tuple[Made, list[str]]:
        """Check model, shards and where the folder goes."""
        config, place = self.config, real(self.config.model)
        self.check_output()
        model, shards = made.get(place), made.get(real(config.shards))
        if place not in made and Path(self.config.model).exists():  # else a hub's name
            check_model(Path(self.config.model))
            model = self._sizes()
        known: Manifest | Planned | None = shards if isinstance(shards, Planned) else None
        if real(config.shards) not in made:
            known = load_manifest(config.shards)
        found, lines = self.plan(model if isinstance(model, Sizes) else None, known)
        return {real(config.output): found}, lines

    def make(self, folder: Path) -> dict[str, Any]:
        """Write the model."""
        config = self.config
        # What an earlier stage, or a hub, has given is known now.
        show(*self.plan(self._sizes(), load_manifest(config.shards))[1])
        self.writer()(config.model, config.shards, folder, **self._settings(), say=show)
        return {}

    def _sizes(self) -> Sizes | None:
        from pretrain.model.folder import model_config

        try:
            return Sizes.of(model_config(self.config.model, self.config.model))
        except OSError:  # no hub answers; loading says so
            return None

    def _settings(self) -> dict[str, Any]:
        """Return the keys that shape the folder."""
        return dict(self.config.model_dump(mode="json", exclude={*self.places, "model"}))

    def inputs(self) -> dict[str, Any]:
        """Return what shapes the folder; a hub's model is known by its commit."""
        known = version_of(self.config.model)
        return {
            "shards": load_manifest(self.config.shards).digest,
            "model": [self.config.model, known] if known else UNKNOWN,
            "settings": self._settings(),
        }


class Trim(Written):
    """Trim a vocabulary."""

    keys = TrimKeys
    name, record = "stage trim", "trim.json"

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


class Prune(Written):
    """Prune heads and neurons."""

    keys = PruneKeys
    name, record = "stage prune", "prune.json"
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
        if not architecture_of(sizes.family).attends:
            raise RunError(f"model {model}: a {sizes.family} has no heads to prune")
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
