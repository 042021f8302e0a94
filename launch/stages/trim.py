"""Trim: write a model with the tokens that a corpus uses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from data_prep.disk import hash_file
from data_prep.shards import load_manifest
from launch.commands import quiet
from launch.console import show
from launch.recipe_config import TrimKeys
from launch.stages.stage import Compared, How, Made, names_in, not_ours, real, version_of
from pretrain import RunError
from pretrain.exit_codes import ExitCode
from pretrain.files import replace_json
from pretrain.run_folder import check_model

TRIMMED = "trim.json"  # in the output: what it was made of
CODE = 1  # raised when the same inputs would give another model


class Trim(Compared):
    """Write the model, unless the same was written before."""

    keys = TrimKeys

    @property
    def title(self) -> str:
        """Return which model it trims."""
        return f"vocabulary of {self.config.model}"

    def reads(self) -> dict[str, str]:
        """Return the model and the shards."""
        return {"model": self.config.model, "shards": str(self.config.shards)}

    def check(self, made: Made, how: How, *, dry_run: bool) -> tuple[Made, list[str]]:
        """Check model, shards and where the new model goes."""
        config = self.config
        names = names_in(config.output)
        if names and TRIMMED not in names:
            raise not_ours(config.output, names[0], "stage trim")
        if real(config.model) not in made and Path(config.model).exists():  # else a hub's name
            check_model(Path(config.model))
        if real(config.shards) not in made and load_manifest(config.shards).kind:
            raise RunError(f"shards {config.shards}: hold a task's examples; give a corpus")
        sizes = made.get(real(config.model))
        wanted = f"{config.size:,} tokens" if config.size else f"used {config.min_count} times"
        return {real(config.output): sizes}, [f"tokens of {config.shards}: {wanted}"]

    def is_kept(self) -> bool:
        """Return whether the model of these very inputs is there."""
        return self._kept() == self._identity()

    def run(self, how: How) -> int:
        """Write the model, and what it was made of."""
        config, identity = self.config, self._identity()
        if self._kept() == identity:
            show(f"{config.output}: up to date")
            return ExitCode.DONE
        from pretrain.export.trimming import trim

        quiet()
        if (config.output / TRIMMED).exists():
            shutil.rmtree(config.output)
        trim(
            config.model,
            config.shards,
            config.output,
            min_count=config.min_count,
            size=config.size,
            say=show,
        )
        kept = {"inputs": identity, "files": self._files()}
        replace_json(config.output / TRIMMED, kept)
        show(f"{config.output}: done")
        return ExitCode.DONE

    def _files(self) -> dict[str, str]:
        found = sorted(path for path in self.config.output.rglob("*") if path.is_file())
        return {
            str(path.relative_to(self.config.output)): hash_file(path)[0]
            for path in found
            if path.name not in (TRIMMED, "README.md")
        }

    def _kept(self) -> Any:
        """Return what the model was made of; None if a file is missing or was changed."""
        try:
            kept = json.loads((self.config.output / TRIMMED).read_bytes())
            same = kept["files"] == self._files()
            return kept["inputs"] if same and kept["inputs"]["model"][1] else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _identity(self) -> dict[str, Any]:
        """Return what shapes the model; a hub's is known by its commit."""
        config = self.config
        return {
            "shards": load_manifest(config.shards).digest,
            "model": [config.model, version_of(config.model)],
            "settings": [config.min_count, config.size],
            "code": CODE,
        }
