"""Turn `sweep:` of a recipe's training run into one run for each combination of its values."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pretrain.config import RunConfig

_SEED = "train.seed"
_MODELS = ("teacher", "resume_from", "student.init", "model.init")


class Swept(NamedTuple):
    """Hold the entries of a sweep: by label, which value each axis has."""

    output: str
    entries: dict[str, dict[str, str]]
    keep_weights: bool

    def folder(self, label: str) -> str:
        """Return the output of an entry."""
        return f"{self.output}-{label}"


class Entry(NamedTuple):
    """Hold one combination of a sweep's values."""

    label: str  # behind the output's name
    group: str  # without the seed: its runs are repetitions
    settings: dict[str, Any]  # sections and keys, as in a config
    axes: dict[str, str]  # the label of each axis


def entries_of(sweep: Any) -> Iterator[Entry]:
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
                "sweep.shards: tasks are an axis of their own: give a list, such as shards: "
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
        yield Entry(label, group or "all", settings, labels)


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
