"""Scores: compare runs on several tasks, each task with several seeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from data_prep.shards import load_manifest
from launch.commands import quiet
from launch.console import print_table, show
from launch.stage_keys import ScoresKeys
from launch.stages.stage import Compared, How, Made, digest, names_in, not_ours, real
from pretrain import RunError
from pretrain.exit_codes import ExitCode
from pretrain.files import replace_json
from pretrain.run_folder import recorded

SCORES = "scores.json"  # in the output
CODE = 3  # raised when the same inputs would give other scores


class Scores(Compared):
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

    def is_kept(self) -> bool:
        """Return whether scores of these very runs are there."""
        return self._kept() == self._identity()

    def run(self, how: How) -> int:
        """Score the runs, print the table and keep it."""
        config, identity = self.config, self._identity()
        if self._kept() == identity:
            show(f"{config.output / SCORES}: up to date")
            return ExitCode.DONE
        from pretrain.evaluation.suite import (
            differences,
            figures_of,
            rooms,
            score_runs,
            sign,
            timed,
        )

        quiet()
        table = score_runs(config.models, config.split, show)
        figures = figures_of(table, config.teacher, config.without)
        rows: dict[str, dict[str, Any]] = {model: {**found} for model, found in figures.items()}
        if config.baseline is not None:
            for model, figure in differences(table, config.baseline).items():
                rows[model] |= {f"against {config.baseline}": figure, "sign": sign(figure)}
            if config.teacher not in (None, config.baseline):
                rooms_of = {"room": table}
                tasks = sorted({task for of_task in table.values() for task in of_task})
                for task in tasks if len(tasks) > 1 else ():
                    rooms_of[f"room {task}"] = {
                        model: {task: of_task[task]}
                        for model, of_task in table.items()
                        if task in of_task
                    }
                for name, some in rooms_of.items():
                    if {config.baseline, config.teacher} <= some.keys():
                        for model, share in rooms(some, config.baseline, config.teacher).items():
                            rows[model][name] = share or "no room"
        if config.timed:
            for model, runs in config.models.items():
                rows[model] |= timed(runs[0], config.split, show)
        for name, known in config.published.items():
            rows[f"{name}, published"] = {column: f"{value:g}" for column, value in known.items()}
        columns = dict.fromkeys(name for row in rows.values() for name in row)
        print_table(
            ["", *columns],
            [
                [name, *(str(row.get(column, "")) for column in columns)]
                for name, row in rows.items()
            ],
        )
        show(
            "of several seeds the median; ±: 95 % interval of a bootstrap over the examples; "
            "retention: of the teacher's average, over the same tasks; a difference: of means over "
            "seeds, with both drawn"
        )
        if any("room" in row for row in rows.values()):
            teacher, baseline = config.teacher, config.baseline
            show(
                f"room: (x - {baseline}) / ({teacher} - {baseline}), of means; no room: {teacher} "
                "is less than two standard errors ahead"
            )
        seeds = {
            model: {task: {one.seed: one.score for one in runs} for task, runs in of_task.items()}
            for model, of_task in table.items()
        }
        values = {
            m: {name: f._asdict() for name, f in found.items()} for m, found in figures.items()
        }
        config.output.mkdir(parents=True, exist_ok=True)
        others = {
            name: {k: v for k, v in row.items() if k not in figures[name]}
            for name, row in rows.items()
            if name in figures
        }
        kept = {"inputs": identity, "figures": values, "seeds": seeds, "others": others}
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
            "baseline": config.baseline,
            "without": list(config.without),
            "split": config.split,
            "timed": config.timed,
            "published": config.published,
            "code": CODE,
        }
