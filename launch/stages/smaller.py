"""Make a model smaller: what the stages have in common that write one folder from another."""

from __future__ import annotations

import json
import shutil
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from data_prep.disk import hash_file
from data_prep.shards import load_manifest
from launch.commands import quiet
from launch.console import show
from launch.stages.stage import Compared, How, Made, names_in, not_ours, real, version_of
from pretrain.exit_codes import ExitCode
from pretrain.files import replace_json
from pretrain.plan import Sizes
from pretrain.run_folder import check_model


class Smaller(Compared):
    """Write the model, unless the same was written before.

    A subclass names the stage and its `code`, which is raised when the same inputs would give
    another model. All keys but `own` shape the model.
    """

    name: ClassVar[str]
    code: ClassVar[int] = 1
    own: ClassVar[set[str]] = {"stage", "output", "model", "shards"}

    @abstractmethod
    def writer(self) -> Callable[..., None]:
        """Return what writes the model, given model, shards, output, the keys and `say`."""

    @abstractmethod
    def plan(self, sizes: Sizes | None) -> tuple[Sizes | None, list[str]]:
        """Return the sizes of the new model and lines of `--dry-run`.

        Args:
            sizes: of the model, where they are known.

        Raises:
            RunError: the model has fewer than that.
        """

    def reads(self) -> dict[str, str]:
        """Return the model and the shards."""
        return {"model": self.config.model, "shards": str(self.config.shards)}

    def check(self, made: Made, how: How, *, dry_run: bool) -> tuple[Made, list[str]]:
        """Check model, shards and where the new model goes."""
        config = self.config
        names = names_in(config.output)
        if names and self._record.name not in names:
            raise not_ours(config.output, names[0], f"stage {self.name}")
        sizes = made.get(real(config.model))
        if real(config.model) not in made and Path(config.model).exists():  # else a hub's name
            check_model(Path(config.model))
            sizes = self._sizes()
        small, lines = self.plan(sizes if isinstance(sizes, Sizes) else None)
        return {real(config.output): small}, lines

    def _sizes(self) -> Sizes | None:
        from pretrain.model.folder import model_config

        try:
            return Sizes.of(model_config(self.config.model, self.config.model))
        except OSError:  # no hub answers; loading says so
            return None

    @property
    def _record(self) -> Path:
        """Return the file in the output that says what it was made of."""
        path: Path = self.config.output / f"{self.name}.json"
        return path

    def is_kept(self) -> bool:
        """Return whether the model of these very inputs is there."""
        return bool(self._kept() == self._identity())

    def run(self, how: How) -> int:
        """Write the model, and what it was made of."""
        config, identity = self.config, self._identity()
        if self._kept() == identity:
            show(f"{config.output}: up to date")
            return ExitCode.DONE
        self.plan(self._sizes())  # what an earlier stage, or a hub, has given it
        write = self.writer()
        quiet()
        if self._record.exists():
            shutil.rmtree(config.output)
        write(config.model, config.shards, config.output, **self._settings(), say=show)
        replace_json(self._record, {"inputs": identity, "files": self._files()})
        show(f"{config.output}: done")
        return ExitCode.DONE

    def _files(self) -> dict[str, str]:
        found = sorted(path for path in self.config.output.rglob("*") if path.is_file())
        return {
            str(path.relative_to(self.config.output)): hash_file(path)[0]
            for path in found
            if path.name not in (self._record.name, "README.md")
        }

    def _kept(self) -> Any:
        """Return what the model was made of; None if a file is missing or was changed."""
        try:
            kept = json.loads(self._record.read_bytes())
            same = kept["files"] == self._files()
            return kept["inputs"] if same and kept["inputs"]["model"][1] else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _settings(self) -> dict[str, Any]:
        """Return the keys that shape the model."""
        return dict(self.config.model_dump(mode="json", exclude=self.own))

    def _identity(self) -> dict[str, Any]:
        """Return what shapes the model; a hub's is known by its commit."""
        config = self.config
        return {
            "shards": load_manifest(config.shards).digest,
            "model": [config.model, version_of(config.model)],
            "settings": self._settings(),
            "code": self.code,
        }
