"""Measure models, or runs over tasks and seeds; keep the figures with what they were made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.disk import hash_file
from data_prep.disk.made import UNKNOWN
from data_prep.disk.replacing import replace_json
from data_prep.shards import load_manifest
from data_prep.shards.manifest import Split
from launch.commands import quiet
from launch.console import print_table, show
from launch.stage_keys import EvaluateKeys, ScoresKeys
from launch.stages.stage import Compared, How, Made, digest, made_by, real
from pretrain import RunError
from pretrain.monitor.figures import Figure, with_columns
from pretrain.run_folder import (
    MEASURED,
    check_model,
    check_source,
    has_other_shards,
    recorded,
    sealed_state,
    teacher_of_runs,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


_SIZES = {"M parameters": "M parameters", "MB": "MB", "ms": "p50 ms"}
TIMED = {
    "M parameters": "millions of weights, without the head of a task",
    "MB": "of the file of weights",
    "ms": "median time of one text of 16 tokens on one core, without the head of a task",
}


class Evaluate(Compared):
    """Measure models, unless the same were measured on the same data before."""

    keys, name, record, code = EvaluateKeys, "evaluation", "figures.json", 2

    @property
    def title(self) -> str:
        """Return the number of models."""
        return f"figures of {len(self.config.models)} model(s)"

    def reads(self) -> dict[str, str]:
        """Return data and models."""
        config = self.config
        models = {f"models.{i}": name for i, name in enumerate(config.models)}
        teacher = {"teacher": config.teacher} if config.teacher is not None else {}
        return {**models, **teacher, "data": str(config.data)}

    def check(self, made: Made, how: How, *, dry_run: bool) -> tuple[Made, list[str]]:
        """Check that data and models are there or will be, and where the figures go."""
        self.check_output(below=True)
        there = [name for name in self.config.models if made_by(name) not in made]
        if self.config.teacher is None:
            teacher_of_runs([name for name in there if Path(name).is_dir()])
        for name in there:
            check_model(Path(name))
        if self.config.teacher is not None and made_by(self.config.teacher) not in made:
            check_source("teacher", self.config.teacher)
        if not dry_run and real(self.config.data) not in made and not self.config.data.is_file():
            load_manifest(self.config.data)
        lines = [f"models: {', '.join(self.config.models)}", f"data: {self.config.data}"]
        return {real(self.config.output): None}, lines

    def make(self, folder: Path) -> dict[str, Any]:
        """Measure, print the table and keep it."""
        config = self.config
        teacher, same = config.teacher, config.same_vocabulary
        if teacher is None:
            teacher, known = teacher_of_runs(config.models)
            same |= known
        found, meanings = measure(
            config.models, config.data, teacher, same, config.rows, config.split
        )
        if config.timed:
            models = [name for name in found if name in (teacher, *config.models)]
            found, meanings = with_times(found, models), {**meanings, **TIMED}
        names = row_names(found)
        named = {names[model]: figures for model, figures in found.items()}
        show_figures(named, meanings)
        return {"figures": {model: as_json(figures) for model, figures in named.items()}}

    def inputs(self) -> dict[str, Any]:
        """Return what shapes the figures; a hub's name tells no version."""
        config, data = self.config, self.config.data
        teacher = config.teacher or teacher_of_runs(config.models)[0]
        models = [digest(name) for name in config.models]
        return {
            "data": hash_file(data)[0] if data.is_file() else load_manifest(data).digest,
            "models": UNKNOWN if None in models else dict(zip(config.models, models, strict=True)),
            "teacher": "" if teacher is None else digest(teacher) or UNKNOWN,
            "rows": config.rows or 0,
            "split": config.split,
            "same_vocabulary": config.same_vocabulary,
            "timed": config.timed,
        }


def with_times(
    found: Mapping[str, Mapping[str, Figure]], models: Sequence[str]
) -> dict[str, Mapping[str, Figure]]:
    """Return figures with the size of each model, and the time of a text."""
    from pretrain.bench.speed import compare_speed

    measured = compare_speed(models, show, batches=False)
    added = {
        name: {key: Figure(round(one[of], 2)) for key, of in _SIZES.items() if of in one}
        for name, one in measured.items()
    }
    return {name: {**figures, **added.get(name, {})} for name, figures in found.items()}


def as_json(figures: Mapping[str, Figure]) -> dict[str, Any]:
    """Return figures by name as a record keeps them."""
    return {name: figure._asdict() for name, figure in figures.items()}


def measure(
    models: Sequence[str],
    data: Path,
    teacher: str | None,
    same_vocabulary: bool,
    rows: int | None,
    split: Split = "validation",
    say: Callable[[str], None] = show,
) -> tuple[Mapping[str, Mapping[str, Figure]], Mapping[str, str]]:
    """Return the figures of each model, and what each figure means.

    Vectors are what models with and without an LM head have in common.
    """
    from data_prep.messages import warn
    from pretrain.evaluation import encoders, heads

    quiet()
    for name in models if not data.is_file() else ():
        config = recorded(Path(name))
        same = config is not None and real(config.shards) == real(data)
        if same and has_other_shards(Path(name), load_manifest(data).digest):
            say(f"note: {name} was trained on different shards than {data} holds now")
    if not data.is_file() and load_manifest(data).has_labels:
        from pretrain.evaluation.tasks import MEANINGS, evaluate_tasks

        if rows is not None:
            raise RunError("--rows: is for a corpus; the examples of a task are read as a whole")
        found = evaluate_tasks(
            models, data, teacher=teacher, split=split, same_vocabulary=same_vocabulary
        )
        keep_figures(models, f"{split} examples", teacher, found)
        return found, MEANINGS
    if split != "validation":
        raise RunError(f"split {split}: is for the examples of a task; leave it out")
    if data.is_file() or any(encoders.is_encoder(model) for model in models):
        found = encoders.evaluate_encoders(
            models,
            data,
            teacher,
            say,
            same_vocabulary=same_vocabulary,
            documents=rows or encoders.DOCUMENTS,
        )
        what = f"pairs of {data.name}" if data.is_file() else "validation documents"
        keep_figures(models, what, teacher, found)
        return found, encoders.MEANINGS
    found = heads.evaluate_heads(
        models,
        data,
        teacher=teacher,
        same_vocabulary=same_vocabulary,
        rows=rows or 1024,
        say=say,
        warn=warn,
    )
    what = f"masked tokens of at most {rows or 1024:,} validation rows"
    keep_figures(models, what, teacher, found)
    return found, heads.MEANINGS


def keep_figures(
    models: Sequence[str], what: str, teacher: str | None, found: Mapping[str, Mapping[str, Figure]]
) -> None:
    """Keep the figures of each run's newest checkpoint in its folder, for the card of an export."""
    from pretrain.evaluation.validation import UNTRAINED

    for model in models:
        run = Path(model)
        sealed = sealed_state(run)
        if sealed is None:  # no run
            continue
        step, file = sealed[1]["step"], run / MEASURED
        known = json.loads(file.read_bytes()) if file.exists() else {}
        tables = known["tables"] if known.get("step") == step else {}
        # A published card names no folder of this machine, and no other run's figures.
        names = {teacher: "teacher", model: "student", f"{run.name}, untrained": "untrained"}
        rows = [
            [names.get(name, name), shown(figures)]
            for name, figures in found.items()
            if name in {*names, UNTRAINED} or not (name in models or name.endswith(", untrained"))
        ]
        replace_json(file, {"step": step, "tables": {**tables, what: rows}})


def shown(figures: Mapping[str, Figure]) -> dict[str, str]:
    """Return figures as a card shows them, without those of single layers and ranks."""
    return {k: str(v) for k, v in figures.items() if " of ranks " not in k and "layer" not in k}


def row_names(models: Iterable[str]) -> dict[str, str]:
    """Return the last part of each path, whole paths if two share it.

    The student in a checkpoint is named by its run and step.
    """
    from pretrain.run_folder import checkpoint_of

    names = {model: Path(model).name for model in models}
    for model in names:
        if (checkpoint := checkpoint_of(Path(model))) is not None:
            names[model] = f"{checkpoint.parents[1].name}, {checkpoint.name}"
    return names if len(set(names.values())) == len(names) else {model: model for model in names}


def show_figures(found: Mapping[str, Mapping[str, Figure]], meanings: Mapping[str, str]) -> None:
    """Print a table of figures with their intervals, a model in each row, and what they mean.

    Figures whose names begin as a meaning does, such as those of each layer, are a table of their
    own.
    """
    from launch.console import print_table, show
    from pretrain.evaluation.validation import UNTRAINED

    names = list(dict.fromkeys(name for figures in found.values() for name in figures))
    series = [p for p in meanings if p not in names and any(n.startswith(p) for n in names)]
    for prefix in ["", *series]:
        columns = [name for name in names if name.startswith(prefix)]
        if not prefix:
            columns = [name for name in columns if not name.startswith(tuple(series))]
        cells = [
            [model, *(str(figures.get(name, "")) for name in columns)]
            for model, figures in found.items()
            if not figures.keys().isdisjoint(columns)
        ]
        print_table([prefix.strip(), *(name.removeprefix(prefix) for name in columns)], cells)
        show(*(f"{name.strip()}: {meanings[name]}" for name in ([prefix] if prefix else columns)))
    if UNTRAINED in found:
        show(f"{UNTRAINED}: the student before its first step, with the teacher's weights")


class Scores(Compared):
    """Score runs on their tasks, unless the same were scored before."""

    keys, name, record, code = ScoresKeys, "stage scores", "scores.json", 3

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
        self.check_output()
        for run in self.reads().values():
            if real(run) not in made and recorded(Path(run)) is None:
                raise RunError(f"{run}: no such run; check models, or make it in an earlier stage")
        lines = [f"{name}: {len(runs)} run(s)" for name, runs in self.config.models.items()]
        return {real(self.config.output): None}, lines

    def make(self, folder: Path) -> dict[str, Any]:
        """Score the runs, print the table and keep it."""
        config = self.config
        from pretrain.evaluation.suite import (
            differences,
            figures_of,
            rooms,
            score_runs,
            sign,
            timed,
        )

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
        print_table(*with_columns(rows.items()))
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
        others = {
            name: {k: v for k, v in row.items() if k not in figures[name]}
            for name, row in rows.items()
            if name in figures
        }
        values = {model: as_json(found) for model, found in figures.items()}
        return {"figures": values, "seeds": seeds, "others": others}

    def inputs(self) -> dict[str, Any]:
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
        }
