"""Define a recipe: stages that are made one after the other and name each other's output."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, model_validator

from data_prep.keys import Keys
from launch.stage_keys import (
    EvaluateKeys,
    ExamplesKeys,
    ExportKeys,
    PrepareKeys,
    PruneKeys,
    ScoresKeys,
    SweepKeys,
    TrainKeys,
    TrimKeys,
)
from launch.sweep_config import (
    Swept,
    entries_of,
    merged,
    refuse_swept,
    refuse_without_weights,
    resolve,
)
from pretrain.objectives.known import objective_kind, unread_keys, with_objective
from pretrain.owner_config import PricePerHour, Slurm

Stages = (
    TrainKeys
    | PrepareKeys
    | ExamplesKeys
    | TrimKeys
    | PruneKeys
    | ScoresKeys
    | EvaluateKeys
    | ExportKeys
    | SweepKeys
)
Entry = Annotated[Stages, Field(discriminator="stage")]


class Recipe(Keys):
    """Hold the stages of a recipe in their order; an entry without `stage:` is a training run.

    `defaults` are the keys that all training runs share; a run's own keys come on top. A run whose
    objective does not read one of them is without it. A later stage may name the output of an
    earlier one. `sweep:` repeats a run, once for each combination of its values; with
    `keep_weights: true` other runs can use the results, and `at_once` limits how many train
    together.
    """

    defaults: dict[str, Any] = Field({}, exclude=True)
    """Keys that all training runs share; a run's own come on top, and one that its objective does
    not read is left out.
    """
    slurm: Slurm = Slurm()
    """What the cluster asks for: of the whole recipe, not of its runs."""
    price_per_hour: PricePerHour = None
    """Of one GPU, or of a node without GPUs, for the price that `--dry-run` prints."""
    runs: tuple[Entry, ...] = Field(min_length=1)
    """Stages in their order: keys of a run, or with `stage:` those of another one. A later one may
    name the output of an earlier one. `sweep:` repeats a run for each combination of its values;
    with `keep_weights: true` others can use the results, and `at_once` limits how many train
    together.
    """

    @model_validator(mode="before")
    @classmethod
    def with_defaults(cls, values: Any) -> Any:
        """Fill the shared keys into each run, so that a mistake in them is named with its path."""
        return filled(values)

    @model_validator(mode="after")
    def one_job(self) -> Recipe:
        """Refuse keys of a job in a run: the recipe is one job."""
        for number, run in enumerate(self.runs):
            for key, default in (("slurm", Slurm()), ("price_per_hour", None)):
                if getattr(run, key, default) != default:
                    raise ValueError(
                        f"runs.{number}.{key}: a recipe is one job; put it beside `runs`"
                    )
        return self

    @model_validator(mode="after")
    def outputs_differ(self) -> Recipe:
        """Refuse two runs that would write to one folder."""
        outputs = [str(run.output) for run in self.runs]
        if twice := [output for output in outputs if outputs.count(output) > 1]:
            raise ValueError(f"two runs have the output {twice[0]}: each needs its own")
        return self


def filled(values: Any) -> Any:
    """Return the values of a recipe with the shared keys in each run, and sweeps as their runs.

    Raises:
        ValueError: a sweep, or a stage that names one, has a mistake.
    """
    if not isinstance(values, dict) or not isinstance(runs := values.get("runs"), list):
        return values
    shared = values.get("defaults") or {}
    found, sweeps = [], dict[str, Swept]()
    for number, own in enumerate(runs):
        run = own
        try:
            if isinstance(own, dict) and own.get("stage") == "scores":
                run = {**own, "models": with_entries(own.get("models"), sweeps)}
            elif not isinstance(own, dict) or own.setdefault("stage", "train") != "train":
                refuse_swept(own if isinstance(own, dict) else {}, sweeps)
            elif "sweep" in own:
                run = swept(shared, own, sweeps)
            else:
                run = completed(shared, own)
                resolve(run, sweeps, {})
        except ValueError as error:
            raise ValueError(f"runs.{number}.{error}") from None
        found.append(run)
    return {**values, "runs": found}


def with_entries(models: Any, sweeps: Mapping[str, Swept]) -> Any:
    """Return the runs of each model, with those of a sweep in its place.

    Raises:
        ValueError: a sweep keeps no weights.
    """
    if not isinstance(models, dict):
        return models
    found: dict[str, Any] = {}
    for name, runs in models.items():
        sweep = sweeps.get(os.path.realpath(runs)) if isinstance(runs, str) else None
        if sweep is None:
            for run in runs if isinstance(runs, list) else [runs]:
                refuse_without_weights(f"models.{name}", str(run), sweeps)
            found[name] = [runs] if isinstance(runs, str) else runs
            continue
        for label, axes in sweep.entries.items():
            refuse_without_weights(f"models.{name}", sweep.folder(label), sweeps)
            model = f"{name} {axes['']}" if "" in axes else name
            found.setdefault(model, []).append(sweep.folder(label))
    return found


def swept(shared: Any, own: dict[str, Any], sweeps: dict[str, Swept]) -> dict[str, Any]:
    """Return the run of each combination of a sweep; `sweeps` receives it."""
    kept: dict[str, Any] = {k: own[k] for k in ("keep_weights", "at_once") if k in own}
    rest = {key: value for key, value in own.items() if key not in (*kept, "sweep", "stage")}
    entries = list(entries_of(own["sweep"]))
    output = rest.get("output")
    if not isinstance(output, str | os.PathLike):  # what is said about the key is enough
        return {"stage": "sweep", "output": output, **kept, "sweep": {}, "groups": {}}
    output = os.path.normpath(output)  # without a slash at its end
    sweep = Swept(output, {e.label: e.axes for e in entries}, kept.get("keep_weights") is True)
    runs = {}
    for entry in entries:
        run = completed(shared, merged(rest, entry.settings))
        resolve(run, sweeps, entry.axes)
        runs[entry.label] = {**run, "output": sweep.folder(entry.label)}
    sweeps[os.path.realpath(output)] = sweep
    groups = {entry.label: entry.group for entry in entries}
    return {"stage": "sweep", "output": output, **kept, "sweep": runs, "groups": groups}


def completed(shared: Any, own: dict[str, Any]) -> Any:
    """Return a run's keys on top of the shared ones, without those that it does not read."""
    run = merged(shared, own)
    kind = objective_kind(run) if isinstance(run, dict) else None
    if kind is not None:
        unread = {*unread_keys(kind)}
        if "model" in own:  # which is the student then
            unread.add("student")
        run = {key: value for key, value in run.items() if key in own or key not in unread}
    return with_objective(run)
