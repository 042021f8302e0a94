"""Explain a mistake in a config in one sentence: the key, what is wrong with it, and the fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from data_prep.config import CorpusConfig
from data_prep.examples.examples_config import ExamplesConfig
from data_prep.keys import Keys
from data_prep.messages import one_line
from launch.recipe_config import Recipe, filled
from launch.stage_keys import SweepKeys
from pretrain.config import RunConfig
from pretrain.objectives.known import GONE, objective_kind, with_objective

_SHOWN, _LONGEST = 60, 300  # characters of what was given, and of a sentence
# What a section most often means where a single value was given for it.
_SHORT = {
    "objective": "name",
    "model": "init",
    "student": "init",
    "masking": "mode",
    "task": "name",
}
# A config that a run has saved has all of them, with all keys, of which nobody wrote most.
_SECTIONS = {"student", "objective", "masking", "optimizer", "train", "evaluation", "checkpoint"}
_COMMANDS: dict[type[BaseModel], str] = {
    CorpusConfig: "is a corpus: distil prepare",
    ExamplesConfig: "is the data of a task: distil prepare",
    RunConfig: "is one run: distil pretrain",
    Recipe: "is a recipe: distil recipe",
}


def other_kind(model: type[BaseModel], values: dict[str, Any], path: Path) -> str | None:
    """Return the command for a file of a different kind, such as a recipe given to `pretrain`."""
    found = model_of(values)
    if found is None or found is model or model not in _COMMANDS:
        return None
    return f"{_COMMANDS[found]} {path}"


def model_of(values: Mapping[str, Any]) -> type[Keys] | None:
    """Return the class of a file's keys; None if no key tells it."""
    if "runs" in values:
        return Recipe
    if "sources" in values:
        return CorpusConfig
    if {"shards", "teacher", "objective", "model", "optimizer"} & values.keys():
        return RunConfig
    return ExamplesConfig if "task" in values else None


def unread(config: BaseModel, values: dict[str, Any]) -> str | None:
    """Return a mistake that no key has by itself: one is written, and nothing reads it.

    A key in a recipe's `defaults:`, or in a sweep, is a mistake only if no run reads it.
    """
    groups: list[tuple[str, list[RunConfig], Any]] = []
    if isinstance(config, Recipe):
        for i, entry in enumerate(config.runs):
            each: list[Any] = [*entry.sweep.values()] if isinstance(entry, SweepKeys) else [entry]
            trained = [run for run in each if isinstance(run, RunConfig)]
            groups.append((f"runs.{i}.", trained, values["runs"][i]))
        every = [run for _, runs, _ in groups for run in runs]
        groups.insert(0, ("defaults.", every, values.get("defaults") or {}))
    elif isinstance(config, RunConfig) and not values.keys() >= _SECTIONS:
        groups = [("", [config], values)]
    for prefix, runs, written in groups:
        # One of the runs that share a key must read it.
        for key in sorted(set.intersection(*(set(run.unread()) for run in runs)) if runs else ()):
            section, _, inner = key.partition(".")
            there = written.get(section)
            if there is not None and (not inner or (isinstance(there, dict) and inner in there)):
                return f"{prefix}{key}: {runs[0].unread()[key]}"
        if written.get("vectors", "") is None:
            return f"{prefix}vectors is empty, as of an unset variable: give a path, or remove it"
    return None


def explain(model: type[BaseModel], values: dict[str, Any], error: ValidationError) -> str:
    """Return the most useful mistake as a sentence.

    Args:
        model: what the file should hold.
        values: what it holds.
        error: of pydantic, whose locations also name union members, which no user wrote.
    """
    if {"sources", "task"} <= values.keys():
        return "sources are of a corpus, and task is of the data of a task: remove one of the two"
    if model is Recipe:
        with suppress(ValueError):  # the mistake is explained by itself
            values = filled(values)
    if model is RunConfig:
        with suppress(ValueError):
            values = with_objective(values)

    def place(entry: Any) -> tuple[Any, ...]:
        """Return the location without the stage of a recipe's entry, a name of sections, too."""
        loc: tuple[Any, ...] = entry["loc"]
        return loc[:2] + loc[3:] if model is Recipe and loc[:1] == ("runs",) else loc

    def written(entry: Any) -> list[Any]:
        """Return the location of a mistake in the file."""
        here: Any = values
        found, location = [], place(entry)
        for number, part in enumerate(location):
            inside = isinstance(here, list) and isinstance(part, int) and part < len(here)
            if inside or (isinstance(here, dict) and part in here):
                here = here[part]
                found.append(part)
            elif number == len(location) - 1 and entry["type"] == "missing":
                found.append(part)
        return found

    def rank(entry: Any) -> tuple[bool, int]:
        # A key that is right in another member of a union is not unknown. Of the mistakes that
        # every member of a union has to report, the innermost is in the member that was meant.
        location = written(entry)
        unknown = entry["type"] == "extra_forbidden"
        unknown = unknown and location[-1] not in _properties(
            model, *_node(model, values, location[:-1])
        )
        return not unknown, -len(entry["loc"])

    # One mistake at a time: the first is the one to fix. Members of a union repeat it, and missing
    # keys follow from unknown ones.
    errors = sorted(error.errors(), key=rank)
    first = errors[0]
    location = written(first)
    key = one_line(".".join(map(str, location)), _SHOWN)
    if first["type"] == "extra_forbidden":
        text = _unknown(model, values, location)
        errors = [entry for entry in errors if entry["type"] == "extra_forbidden"]
    elif first["type"] == "invalid_key":
        text = f"key {one_line(str(first['loc'][-1]), _SHOWN)} is not text; put it in quotes"
    elif first["type"] == "missing":
        text = f"{key} is missing"
    elif first["type"].startswith("union_tag"):
        text = f"{key}: {_unknown_name(first)}"
    elif first["type"] in ("model_type", "dict_type", "model_attributes_type"):
        name, given = str(location[-1]), one_line(str(first["input"]), _SHOWN)
        text = f"{key} is a section, not a single value"
        if name in _SHORT and isinstance(first["input"], str):
            text += f"; write {key}.{_SHORT[name]}={given}"
            text += f" (in YAML `{name}: {{{_SHORT[name]}: {given}}}`)"
        elif keys := list(_properties(model, *_node(model, values, location))):
            text += f" ({given}); its keys are {', '.join(keys)}"
    elif first["type"] in ("tuple_type", "list_type"):
        text = f"{key}: is a list: [{one_line(str(first['input']), _SHOWN)}]"
    else:
        message = first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        if message.startswith("Input should "):
            message = f"must {message.removeprefix('Input should ').partition(', unable')[0]}"
        if first["type"] == "path_type":
            message = "must be a path"
        given = first["input"]
        plain = isinstance(given, str | int | float | bool)
        shown = f" (given: {one_line(repr(given), _SHOWN)})" if plain else ""
        text = f"{key}: {message[0].lower()}{message[1:]}{shown}" if key else message
    # The written part of the location up to a union, whose members all report this mistake.
    union = tuple(one for one, own in zip(place(first), location, strict=False) if one == own)
    places = {tuple(written(entry)) for entry in errors} - {()}
    if first["type"] != "extra_forbidden":
        places = {place for place in places if place[: len(union)] != union}
    more = len(places - {tuple(location)})
    return one_line(text, _LONGEST) + (f" (and {more} more)" if more else "")


def _unknown_name(entry: Any) -> str:
    """Explain the name of an objective or the kind of a source."""
    context = entry.get("ctx", {})
    name = context["discriminator"].strip("'")
    choices = [choice.strip(" '") for choice in str(context.get("expected_tags", "")).split(",")]
    if "tag" not in context:
        return f"{name} is missing; one of {', '.join(choices)}"
    tag = one_line(str(context["tag"]), _SHOWN)
    close = difflib.get_close_matches(str(context["tag"]).lower(), choices, n=1)
    if entry["loc"][-1] == "task" and tag in ("regression", "similarity"):
        return f"{name} {tag!r} is of data; a run of such data has name: classification, one output"
    own = ", or FILE:CLASS" * (entry["loc"][-1] == "objective")
    hint = f"did you mean {close[0]}?" if close else f"one of {', '.join(choices)}{own}"
    return f"{name} {tag!r} is not known; {hint}"


def _unknown(model: type[BaseModel], values: dict[str, Any], location: Sequence[Any]) -> str:
    """Explain an unknown key: where it belongs, or which one was meant."""
    *parent, name = location
    key, name = one_line(".".join(map(str, location)), _SHOWN), str(name)
    node, section = _node(model, values, parent)
    siblings = list(_properties(model, node, section))
    if parent[-1:] == ["objective"] and ":" in str(section.get("name")):  # of a user's own file
        with suppress(ValueError):
            kind = objective_kind({"objective": section})
            siblings = [*kind.model_fields] if kind is not None else []
            close = difflib.get_close_matches(name, siblings, n=1)
            hint = f"did you mean {close[0]}?" if close else f"its keys are {', '.join(siblings)}"
            return f"unknown key {key}; {hint}"
    if ".".join(map(str, location[-2:])) in (*GONE, "resume_from"):
        return f"key {key} is gone in this version: remove it"
    if ":" in name:
        return f"unknown key {key}: YAML needs a space after the colon"
    union = _resolved(model, node).get("discriminator", {})
    having = [tag for tag, ref in union.get("mapping", {}).items() if name in _at(model, ref)]
    close = difflib.get_close_matches(name, siblings, n=1)
    if close and not having:
        return f"unknown key {key}; did you mean {'.'.join(map(str, [*parent, close[0]]))}?"
    if (tag := union.get("propertyName")) is not None and tag in section:
        *first, last = having or [""]
        listed = f"{', '.join(first)} and {last}" if first else last
        others = f" ({listed} ha{'ve' if first else 's'})" * bool(having)
        names = [part for part in parent if isinstance(part, str)]
        what = tag if tag == "stage" else names[-1]
        return (
            f"unknown key {key}: {what} {one_line(str(section[tag]), _SHOWN)} has no {name}"
            f"{others}; its keys are "
            + (", ".join(sibling for sibling in siblings if sibling != tag) or f"none but {tag}")
        )
    if model is Recipe and not parent and name in RunConfig.model_fields:
        inner = next(iter(section[name]), None) if isinstance(section[name], dict) else None
        shown = f"{name}.{inner}" if inner else name
        return f"{name} is a key of a run: write defaults.{shown} for all runs, or runs.0.{shown}"
    if parent[-1:] == ["logging"] and name in ("wandb", "tensorboard"):
        return f"unknown key {key}: write logging.trackers=[{name}]"
    if model is not CorpusConfig and name in CorpusConfig.model_fields:
        return f"{name} is a key of the corpus: distil prepare CORPUS {name}=..."
    paths = {path.rpartition(".")[2]: path for path in reversed(list(_paths(model, values)))}
    if close := difflib.get_close_matches(name, paths, n=1):
        return f"unknown key {key}; did you mean {paths[close[0]]}?"
    return f"unknown key {key}" + (f"; known here: {', '.join(siblings)}" if siblings else "")


@cache
def _schema(model: type[BaseModel]) -> dict[str, Any]:
    return model.model_json_schema()


def _at(model: type[BaseModel], reference: str) -> dict[str, Any]:
    """Return the keys of a definition with their schemas."""
    definition = _schema(model)["$defs"][reference.rpartition("/")[2]]
    return dict(definition.get("properties", {}))


def _resolved(model: type[BaseModel], node: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in node:
        node = _schema(model)["$defs"][node["$ref"].rpartition("/")[2]]
    return node


def _choices(model: type[BaseModel], node: dict[str, Any], value: Any) -> Iterator[dict[str, Any]]:
    """Yield the schemas that a value may have: of a union with names only the named one."""
    node = _resolved(model, node)
    union = node.get("discriminator", {})
    tag = value.get(union.get("propertyName")) if isinstance(value, dict) else None
    if isinstance(tag, str) and tag in union.get("mapping", {}):
        yield _resolved(model, {"$ref": union["mapping"][tag]})
        return
    yield node
    for member in (*node.get("anyOf", ()), *node.get("oneOf", ()), *node.get("allOf", ())):
        yield from _choices(model, member, value)


def _properties(model: type[BaseModel], node: dict[str, Any], value: Any) -> dict[str, Any]:
    """Return the keys that a section may have, with their schemas."""
    choices = _choices(model, node, value)
    return {key: child for c in choices for key, child in c.get("properties", {}).items()}


def _node(
    model: type[BaseModel], values: Any, location: Sequence[Any]
) -> tuple[dict[str, Any], Any]:
    """Return the schema and the value of a section that is written in the file."""
    node, here = _schema(model), values
    for part in location:
        if isinstance(part, int):
            items = (choice["items"] for choice in _choices(model, node, here) if "items" in choice)
            node = next(items, {})
        else:
            node = _properties(model, node, here).get(part, {})
        here = here[part]
    return node, here


def _paths(
    model: type[BaseModel], values: Any, node: dict[str, Any] | None = None, prefix: str = ""
) -> Iterator[str]:
    """Yield the dotted path of every key that this file may have, without numbers of lists."""
    node = _schema(model) if node is None else node
    for key, child in _properties(model, node, values).items():
        yield prefix + key
        inner = values.get(key) if isinstance(values, dict) else None
        yield from _paths(model, inner, child, f"{prefix}{key}.")
        for choice in _choices(model, child, inner):
            if isinstance(choice.get("items"), dict):
                for item in inner if isinstance(inner, list) else [None]:
                    yield from _paths(model, item, choice["items"], f"{prefix}{key}.")
