"""Write a folder from a model and shards, once: what the stages trim and prune share."""

from __future__ import annotations

import json
import shutil
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from data_prep.disk import hash_file
from data_prep.shards import Manifest, load_manifest
from launch.commands import quiet
from launch.console import show
from launch.stages.stage import Compared, How, Made, names_in, not_ours, real, version_of
from pretrain import RunError
from pretrain.exit_codes import ExitCode
from pretrain.files import replace_json
from pretrain.plan import Planned, Sizes
from pretrain.run_folder import check_model


class Written(Compared):
    """Write the folder, unless the same was written before.

    All keys of the config shape it, but those of `places`.
    """

    name: ClassVar[str]  # name of the stage
    record: ClassVar[str]  # the file in the output that says what it was made of
    code: ClassVar[int] = 1  # raised when the same inputs would give something else
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
        names = names_in(config.output)
        if names and self.record not in names:
            raise not_ours(config.output, names[0], f"stage {self.name}")
        own = set(self._recorded().get("files", ())) | {self.record, "README.md"}
        for path in sorted(config.output.rglob("*")):
            if path.is_file() and str(path.relative_to(config.output)) not in own:
                name = str(path.relative_to(config.output))
                raise not_ours(config.output, name, f"stage {self.name}")
        for key, read in self.reads().items():
            there, target = real(read), real(config.output)
            if target.is_relative_to(there) or there.is_relative_to(target):
                raise RunError(f"output {config.output}: is {key}, or one lies in the other")
        model, shards = made.get(place), made.get(real(config.shards))
        if place not in made and Path(self.config.model).exists():  # else a hub's name
            check_model(Path(self.config.model))
            model = self._sizes()
        known: Manifest | Planned | None = shards if isinstance(shards, Planned) else None
        if real(config.shards) not in made:
            known = load_manifest(config.shards)
        found, lines = self.plan(model if isinstance(model, Sizes) else None, known)
        return {real(config.output): found}, lines

    def is_kept(self) -> bool:
        """Return whether the folder was made of these very inputs."""
        return bool(self._kept() == self._identity())

    def run(self, how: How) -> int:
        """Write the folder beside its place, with what it was made of, and move it there."""
        config, identity = self.config, self._identity()
        if self._kept() == identity:
            show(f"{config.output}: up to date")
            return ExitCode.DONE
        # What an earlier stage, or a hub, has given is known now.
        show(*self.plan(self._sizes(), load_manifest(config.shards))[1])
        write = self.writer()
        quiet()
        target = real(config.output)
        place = target.with_name(f".{target.name}.{self.name}")
        for old in (place, *target.parent.glob(f".tmp-{place.name}-*")):  # left by a killed call
            shutil.rmtree(old, ignore_errors=True)
        try:
            write(self.config.model, config.shards, place, **self._settings(), say=show)
            replace_json(place / self.record, {"inputs": identity, "files": self._files(place)})
            if target.exists():
                shutil.rmtree(target)
            place.rename(target)
        finally:
            shutil.rmtree(place, ignore_errors=True)
        show(f"{config.output}: done")
        return ExitCode.DONE

    def _sizes(self) -> Sizes | None:
        from pretrain.model.folder import model_config

        try:
            return Sizes.of(model_config(self.config.model, self.config.model))
        except OSError:  # no hub answers; loading says so
            return None

    def _files(self, folder: Path) -> dict[str, str]:
        found = sorted(path for path in folder.rglob("*") if path.is_file())
        return {
            str(path.relative_to(folder)): hash_file(path)[0]
            for path in found
            if path.name not in (self.record, "README.md")
        }

    def _recorded(self) -> dict[str, Any]:
        """Return the record of the output; none if it is missing or damaged."""
        try:
            kept = json.loads((self.config.output / self.record).read_bytes())
        except (OSError, ValueError):
            return {}
        return kept if isinstance(kept, dict) and kept.keys() == {"inputs", "files"} else {}

    def _kept(self) -> Any:
        """Return what the folder was made of; None if a file is missing or was changed."""
        kept = self._recorded()
        try:
            same = kept and kept["files"] == self._files(self.config.output)
            return kept["inputs"] if same and kept["inputs"]["model"][1] else None
        except (OSError, KeyError, TypeError):
            return None

    def _settings(self) -> dict[str, Any]:
        """Return the keys that shape the folder."""
        return dict(self.config.model_dump(mode="json", exclude={*self.places, "model"}))

    def _identity(self) -> dict[str, Any]:
        """Return what shapes the folder; a hub's model is known by its commit."""
        return {
            "shards": load_manifest(self.config.shards).digest,
            "model": [self.config.model, version_of(self.config.model)],
            "settings": self._settings(),
            "code": self.code,
        }
