"""Find the objectives that a config may name, in this folder or in a user's own file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import (
    Field,
    SerializeAsAny,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

import pretrain.objectives
from data_prep.disk.json_files import parse_object, read_regular
from pretrain import RunError
from pretrain.objectives.distilbert import DistilBert
from pretrain.objectives.objective import Objective as AnyObjective
from pretrain.objectives.own import Recorded, own_class, validated
from pretrain.tasks.folders import TASKS, named
from pretrain.tasks.task import Task

# A new paper is a file in this folder.
OBJECTIVES: tuple[type[AnyObjective], ...] = (
    *named(pretrain.objectives, AnyObjective),  # type: ignore[type-abstract]
    *(objective for task in TASKS.values() for objective in task.objectives),
)


def _or_own(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Let an objective be one of a user's own file, which `objective_kind` has loaded."""
    if isinstance(value, AnyObjective):
        return value
    kind = objective_kind({"objective": value})
    return validated(kind, value) if kind is not None and kind.file_sha256 else check(value)


if TYPE_CHECKING:
    Objective = AnyObjective
else:
    _Shipped = Annotated[Union[OBJECTIVES], Field(discriminator="name")]  # noqa: UP007
    Objective = Annotated[SerializeAsAny[_Shipped], WrapValidator(_or_own)]


# Keys that runs of earlier versions have recorded, each with the values that are gone: first the
# one that all runs have now, or None.
GONE: dict[str, tuple[Any, ...]] = {
    "student.init": ("teacher", {"project": "teacher"}),
    "train.compile": (False, True),
    "masking.mode": (None, "span"),
    "objective.divergence": ("forward", "reverse", "js"),
}


def without_gone(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a recorded config without keys and values that are gone since."""
    found = dict(values)
    found.pop("resume_from", None)
    for name, gone in GONE.items():
        section, key = name.split(".")
        if isinstance(held := found.get(section), dict) and held.get(key) in gone:
            found[section] = {k: held[k] for k in held.keys() - {key}}
    return found


def with_objective(values: Any) -> Any:
    """Fill in the names of objective and task, and the defaults that an objective has for a run.

    `objective: {kl: 0}` means DistilBERT, like no `objective:`.
    """
    if not isinstance(values, dict) or not isinstance(values.get("objective", {}), dict):
        return values
    objective = {"name": DistilBert().name, **values.get("objective", {})}
    values = {**values, "objective": objective}
    if (kind := objective_kind(values)) is None:
        return values
    begun = _begun(values)
    for name, defaults in kind.defaults.items():
        section, known = values.get(name, {}), begun.get(name, {})
        if isinstance(section, dict) and not (name == "student" and values.get("model")):
            kept = {key: known[key] for key in defaults if key in known}
            values[name] = {**defaults, **kept, **section}
    if isinstance(task := values.get("task", {}), dict):
        values["task"] = {"name": kind.tasks[0], **task}
    return values


def _begun(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a run that has begun in this output, which keeps its defaults."""
    try:
        found = parse_object(read_regular(Path(values["output"]) / "config.json", 2**20))
        return found if found["objective"]["name"] == values["objective"]["name"] else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def unread_keys(kind: type[AnyObjective] | AnyObjective) -> dict[str, str]:
    """Return the keys of a run that an objective does not read, each with what it lacks."""
    return TASKS[kind.tasks[0]].unread(kind)


def objective_kind(values: Any) -> type[AnyObjective] | None:
    """Return the class of the objective that the values of a run name; None if there is none.

    Raises:
        ValueError: it is of a user's own file, and cannot be loaded.
    """
    section = values.get("objective", {})
    if not isinstance(section, dict):
        return None
    name = section.get("name", DistilBert().name)
    if isinstance(name, str) and ":" in name:
        return own_class(name)
    return {kind.model_fields["name"].default: kind for kind in OBJECTIVES}.get(str(name))


def objective_of(state: Mapping[str, Any]) -> AnyObjective:
    """Return the objective of the run that a checkpoint's state is of."""
    config = without_gone(state["config"])
    values = config["objective"]
    try:
        if (own := Recorded.of(config)) is not None:
            return own
    except ValidationError:
        raise RunError(
            f"objective {values['name']}: state.json of the run does not describe it; restore it"
        ) from None
    found: AnyObjective = TypeAdapter(Objective).validate_python(values)
    return found


def task_of(state: Mapping[str, Any]) -> Task:
    """Return the task of the run that a checkpoint's state is of."""
    values = state["config"].get("task") or {"name": objective_of(state).tasks[0]}
    return TASKS[values["name"]].model_validate(values)
