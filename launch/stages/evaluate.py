"""Evaluate: measure models, and keep the figures with what they were measured on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.disk import hash_file
from data_prep.shards import load_manifest
from data_prep.shards.manifest import Split
from launch.commands import quiet
from launch.console import show
from launch.stage_keys import EvaluateKeys
from launch.stages.stage import Compared, How, Made, digest, made_by, names_in, not_ours, real
from pretrain import RunError
from pretrain.exit_codes import ExitCode
from pretrain.files import replace_json
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

    from pretrain.monitor.figures import Figure

FIGURES = "figures.json"  # in the output
CODE = 2  # raised when the same inputs would give other figures


class Evaluate(Compared):
    """Measure models, unless the same were measured on the same data before."""

    keys = EvaluateKeys

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
        self._check_output()
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

    def is_kept(self) -> bool:
        """Return whether figures of these very inputs are there."""
        return self._is_kept(self._identity())

    def run(self, how: How) -> int:
        """Measure, print the table and keep it."""
        config, identity = self.config, self._identity()
        if self._is_kept(identity):
            show(f"{config.output / FIGURES}: up to date")
            return ExitCode.DONE
        teacher, same = config.teacher, config.same_vocabulary
        if teacher is None:
            teacher, known = teacher_of_runs(config.models)
            same |= known
        found, meanings = measure(
            config.models, config.data, teacher, same, config.rows, config.split
        )
        names = row_names(found)
        named = {names[model]: figures for model, figures in found.items()}
        show_figures(named, meanings)
        values = {
            model: {name: figure._asdict() for name, figure in figures.items()}
            for model, figures in named.items()
        }
        config.output.mkdir(parents=True, exist_ok=True)
        replace_json(config.output / FIGURES, {"inputs": identity, "figures": values})
        return ExitCode.DONE

    def _check_output(self) -> None:
        """Refuse a place that holds something else, or that is read."""
        output = self.config.output
        held = names_in(output)
        for key, name in self.reads().items():
            if real(output).is_relative_to(real(name)) and real(name) != real("."):
                raise RunError(f"output {output} lies in {key} {name}; set another `output:`")
        if foreign := [name for name in held if name != FIGURES or self._kept() is None]:
            raise not_ours(output, foreign[0], "evaluation")

    def _kept(self) -> dict[str, Any] | None:
        """Return what an earlier call has kept; None if nothing of this form is there."""
        try:
            kept: dict[str, Any] = json.loads((self.config.output / FIGURES).read_bytes())
            return kept if {"inputs", "figures"} <= kept.keys() else None
        except (OSError, ValueError, AttributeError):
            return None

    def _is_kept(self, identity: Mapping[str, Any]) -> bool:
        """Return whether the kept figures are of these inputs, and all of them can be compared."""
        kept = self._kept()
        return kept is not None and kept["inputs"] == identity and None not in identity.values()

    def _identity(self) -> dict[str, Any]:
        """Return what shapes the figures; None for what cannot be compared, such as a hub's name.

        Raises:
            OSError, CorpusError: an input is not there.
        """
        config, data = self.config, self.config.data
        teacher = config.teacher or teacher_of_runs(config.models)[0]
        models = [digest(name) for name in config.models]
        return {
            "data": hash_file(data)[0] if data.is_file() else load_manifest(data).digest,
            "models": None if None in models else dict(zip(config.models, models, strict=True)),
            "teacher": "" if teacher is None else digest(teacher),
            "rows": config.rows or 0,
            "split": config.split,
            "same_vocabulary": config.same_vocabulary,
            "code": CODE,
        }


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
