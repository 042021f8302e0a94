"""Scores: compare runs on several tasks, each task with several seeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from data_prep import CorpusError
from data_prep.shards import load_manifest
from launch.commands import quiet
from launch.console import print_table, show
from launch.recipe_config import ScoresKeys
from launch.stages.stage import How, Made, Stage, State, digest, names_in, not_ours, real
from pretrain import RunError
from pretrain.exit_codes import ExitCode
from pretrain.files import replace_json
from pretrain.run_folder import recorded

SCORES = "scores.json"  # in the output
CODE = 1  # raised when the same inputs would give other scores


class Scores(Stage):
    """Score runs on their tasks, unless the same were scored before."""

    keys = ScoresKeys

    @property
    def title(self) -> str:
        """Return the number of runs."""
        return f"scores of {sum(map(len, self.config.models.values()))} runs"

    def reads(self) -> dict[str, str]:
        """Return the runs."""
        models = self.config.models
        return {
            f"models.{name}.{i}": run for name, runs in models.items() for i, run in enumerate(runs)
        }

    def check(self, made: Made, how: How, *, dry_run: bool) -> tuple[Made, list[str]]:
        """Check that the runs are there or will be, and where the scores go."""
        for name in names_in(self.config.output):
            if name != SCORES:
                raise not_ours(self.config.output, name, "stage scores")
        for run in self.reads().values():
            if real(run) not in made and recorded(Path(run)) is None:
                raise RunError(f"{run}: no such run; check models, or make it in an earlier stage")
        lines = [f"{name}: {len(runs)} run(s)" for name, runs in self.config.models.items()]
        return {real(self.config.output): None}, lines

    def state(self) -> State:
        """Return whether scores of these very runs are there."""
        try:
            return "done" if self._kept() == self._identity() else "new"
        except (OSError, RunError, CorpusError):
            return "new"  # a run is made by an earlier stage

    def run(self, how: How) -> int:
        """Score the runs, print the table and keep it."""
        config, identity = self.config, self._identity()
        if self._kept() == identity:
            show(f"{config.output / SCORES}: up to date")
            return ExitCode.DONE
        from pretrain.suite import figures_of, score_runs

        quiet()
        table = score_runs(config.models, config.split, show)
        figures = figures_of(table, config.teacher, config.without)
        columns = dict.fromkeys(name for of_model in figures.values() for name in of_model)
        cells = [
            [model, *(str(found.get(name, "")) for name in columns)]
            for model, found in figures.items()
        ]
        print_table(["", *columns], cells)
        show(
            "of several seeds the median; ±: 95 % interval of a bootstrap over the examples; "
            "retention: of the teacher's average, over the same tasks"
        )
        seeds = {
            model: {task: {one.seed: one.score for one in runs} for task, runs in of_task.items()}
            for model, of_task in table.items()
        }
        values = {
            m: {name: f._asdict() for name, f in found.items()} for m, found in figures.items()
        }
        config.output.mkdir(parents=True, exist_ok=True)
        kept = {"inputs": identity, "figures": values, "seeds": seeds}
        replace_json(config.output / SCORES, kept)
        return ExitCode.DONE

    def _kept(self) -> Any:
        try:
            return json.loads((self.config.output / SCORES).read_bytes())["inputs"]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _identity(self) -> dict[str, Any]:
        """Return what shapes the scores.

        Raises:
            OSError, RunError, CorpusError: a run or its shards are not there.
        """
        config = self.config
        runs = dict[str, Any]()
        for run in self.reads().values():
            known = recorded(Path(run))
            if known is None:
                raise RunError(f"{run}: is no run; stage scores compares runs on tasks")
            runs[run] = [digest(run), load_manifest(known.shards).digest]
        return {
            "models": {name: list(names) for name, names in config.models.items()},
            "runs": runs,
            "teacher": config.teacher,
            "without": list(config.without),
            "split": config.split,
            "code": CODE,
        }
