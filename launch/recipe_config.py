"""Define a recipe: stages that are made one after the other and name each other's output.

`sweep:` of a training run becomes one run for each combination of its values.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NamedTuple

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
from pretrain.config import RunConfig, Train
from pretrain.export.owner_config import PricePerHour, Slurm
from pretrain.objectives.known import objective_kind, unread_keys, with_objective

_SEED = "train.seed"
_MODELS = ("teacher", "student.init", "model.init")


class Swept(NamedTuple):
    """Hold the entries of a sweep: by label, which value each axis has."""

    output: str
    entries: dict[str, dict[str, str]]
    keep_weights: bool

    def folder(self, label: str) -> str:
        """Return the output of an entry."""
        return f"{self.output}-{label}"


class Combination(NamedTuple):
    """Hold one combination of a sweep's values."""

    label: str  # behind the output's name
    group: str  # without the seed: its runs are repetitions
    settings: dict[str, Any]  # sections and keys, as in a config
    axes: dict[str, str]  # the label of each axis


def entries_of(sweep: Any) -> Iterator[Combination]:
    """Yield the combinations of a sweep.

    A key with a list is an axis: `train.seed: [0, 1, 2]`. What has another name is an entry of a
    further axis, with its keys: `small: {student.num_layers: 3}`.

    Raises:
        ValueError: it is none; names the key.
    """
    if not isinstance(sweep, dict) or not sweep:
        raise ValueError("sweep: give lists of values, such as sweep: {train.seed: [0, 1, 2]}")
    axes: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    places: list[tuple[str, set[str]]] = []  # the keys that an axis, or a named entry, sets
    for key, value in _flat(sweep):
        if isinstance(value, dict):  # a name
            own = dict(_flat(value, section=True))
            axes.setdefault("", []).append((_text(key), _nested(own)))
            places.append(("", {*own}))
        elif isinstance(value, list) and value:
            if key in Train.model_fields:
                raise ValueError(f"sweep.{key}: no key of a run: write train.{key}")
            last = key.rpartition(".")[2]
            of_value = ((_label(last, v), v) for v in value)
            axes[key] = [(label, _nested({key: v})) for label, v in of_value]
            places.append((key, {key}))
        else:
            raise ValueError(
                f"sweep.{key}: give a list of values, or a name with keys, such as small: "
                "{student.num_layers: 3}"
            )
    for number, (axis, keys) in enumerate(places):
        others = [own for other, own in places[:number] if not (axis == other == "")]
        if twice := keys & set().union(*others):
            raise ValueError(f"sweep: {min(twice)} is set twice; name it once")
        if "output" in keys:
            raise ValueError("sweep.output: each run has an output of its name: remove the key")
        if "shards" in keys and axis != "shards":
            raise ValueError(
                "sweep.shards: cannot be in a named section; give a list, such as shards: "
                "[shards/rte, shards/cola]"
            )
    seen = {""}
    for chosen in itertools.product(*axes.values()):
        labels = {axis: label for axis, (label, _) in zip(axes, chosen, strict=True)}
        settings: dict[str, Any] = {}
        for _, values in chosen:
            settings = merged(settings, values)
        label = "-".join(labels.values())
        if label in seen:
            raise ValueError(
                f"sweep: two entries would be called {label!r}: give names, such as sweep: {{a: "
                "{train.epochs: 1}}"
            )
        seen.add(label)
        group = "-".join(text for axis, text in labels.items() if axis != _SEED)
        yield Combination(label, group or "all", settings, labels)


def resolve(run: dict[str, Any], sweeps: Mapping[str, Swept], axes: Mapping[str, str]) -> None:
    """Replace a model that is a swept run by the entry with the same values, in place.

    Raises:
        ValueError: there is none, or it keeps no weights.
    """
    for key in _MODELS:
        section, _, inner = key.partition(".")
        place = run.get(section) if inner else run
        name = place.get(inner or section) if isinstance(place, dict) else None
        if not isinstance(name, str | os.PathLike):
            continue
        sweep = sweeps.get(os.path.realpath(name))
        if sweep is not None:
            same = [
                label for label, theirs in sweep.entries.items() if theirs.items() <= axes.items()
            ]
            if len(same) != 1:
                raise ValueError(
                    f"{key} {name} is swept over {_axes(sweep)}: give this run the same sweep, or "
                    f"name an entry, such as {sweep.folder(next(iter(sweep.entries)))}"
                )
            name = sweep.folder(same[0])
            # A section may be shared with other runs: this one gets its own.
            run[section] = {**run[section], inner: name} if inner else name
        refuse_without_weights(key, os.fspath(name), sweeps)


def refuse_swept(stage: Mapping[str, Any], sweeps: Mapping[str, Swept]) -> None:
    """Refuse a stage that names a sweep, where it must name one of its entries.

    Raises:
        ValueError: names the key.
    """
    for key, value in stage.items():
        for name in value if isinstance(value, list) else [value]:
            if not isinstance(name, str) or key in ("stage", "output"):
                continue
            if (sweep := sweeps.get(os.path.realpath(name))) is not None:
                raise ValueError(
                    f"{key} {name} is swept over {_axes(sweep)}: name an entry, such as "
                    f"{sweep.folder(next(iter(sweep.entries)))}"
                )
            refuse_without_weights(key, name, sweeps)


def refuse_without_weights(key: str, name: str, sweeps: Mapping[str, Swept]) -> None:
    """Refuse an entry of a sweep that keeps no weights.

    Raises:
        ValueError: names the key.
    """
    place = os.path.realpath(name)
    for sweep in sweeps.values():
        folders = {os.path.realpath(sweep.folder(label)) for label in sweep.entries}
        if place in folders and not sweep.keep_weights:
            raise ValueError(
                f"{key} {name} is an entry of a sweep, which keeps no weights: add keep_weights: "
                f"true to the run of {sweep.output}"
            )


def merged(shared: Any, own: Any) -> Any:
    """Return `own` on top of `shared`; sections are merged key by key."""
    if not isinstance(shared, dict) or not isinstance(own, dict):
        return own
    # A section whose `name` differs, such as another objective, has other keys.
    if "name" in shared and "name" in own and shared["name"] != own["name"]:
        return own
    # Lists and single values are replaced: to join two lists would be a guess.
    keys = {**shared, **own}
    return {key: merged(shared.get(key), own[key]) if key in own else keys[key] for key in keys}


def _axes(sweep: Swept) -> str:
    first = next(iter(sweep.entries.values()))
    return " and ".join(axis or "named entries" for axis in first)


def _flat(
    values: Mapping[str, Any], prefix: str = "", *, section: bool = False
) -> Iterator[tuple[str, Any]]:
    """Yield sections as keys with dots; a name of an entry keeps its keys."""
    for key, value in values.items():
        is_section = section or bool(prefix) or key in RunConfig.model_fields
        if is_section and isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys with dots as sections."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        *sections, last = str(key).split(".")
        inner: dict[str, Any] = {last: value}
        for section in reversed(sections):
            inner = {section: inner}
        found = merged(found, inner)
    return found


def _label(key: str, value: object) -> str:
    if key == "shards":  # a task
        return _text(os.path.basename(os.path.normpath(str(value))))
    return _text(value) if key == "name" else key + _text(value)


def _text(value: object) -> str:
    """Return a value as a part of a folder's name."""
    return re.sub(r"[^\w.+]+", "-", str(value)).rstrip("-")


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
        # Runs of a sweep that has begun keep its defaults, also those that have not.
        places = [sweep.folder(label) for label in (entry.label, *sweep.entries)]
        place = next((p for p in places if os.path.exists(f"{p}/config.json")), output)
        run = completed(shared, {**merged(rest, entry.settings), "output": place})
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
