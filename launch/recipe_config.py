"""Define a recipe: runs that are trained one after the other and name each other's output."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from data_prep.keys import Keys
from pretrain import RunError
from pretrain.config import RunConfig
from pretrain.objectives.known import objective_kind, unread_keys, with_objective


class Recipe(Keys):
    """Hold the runs of a recipe in their order.

    `defaults` are the keys that all runs share; a run's own keys come on top. A run whose objective
    does not read one of them is without it. `teacher`, `student.init` and `resume_from` of a later
    run may name the output of an earlier one.
    """

    defaults: dict[str, Any] = Field({}, exclude=True)
    runs: tuple[RunConfig, ...] = Field(min_length=1)

    @model_validator(mode="before")
    @classmethod
    def with_defaults(cls, values: Any) -> Any:
        """Fill the shared keys into each run, so that a mistake in them is named with its path."""
        return filled(values)

    @model_validator(mode="after")
    def outputs_differ(self) -> Recipe:
        """Refuse two runs that would write to one folder."""
        outputs = [str(run.output) for run in self.runs]
        if twice := [output for output in outputs if outputs.count(output) > 1]:
            raise ValueError(f"two runs have the output {twice[0]}: each needs its own")
        return self


def filled(values: Any) -> Any:
    """Return the values of a recipe with the shared keys in each run that reads them."""
    if not isinstance(values, dict) or not isinstance(runs := values.get("runs"), list):
        return values
    shared = values.get("defaults") or {}
    found = []
    for own in runs:
        run = merged(shared, own)
        kind = objective_kind(run) if isinstance(own, dict) and isinstance(run, dict) else None
        if kind is not None:
            unread = {*unread_keys(kind)}
            if "model" in own:  # which is the student then
                unread.add("student")
            run = {key: value for key, value in run.items() if key in own or key not in unread}
        found.append(with_objective(run))
    return {**values, "runs": found}


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


def check_order(runs: Sequence[RunConfig]) -> None:
    """Refuse a model that a later run makes, or that is not there and that no run makes.

    Raises:
        RunError: names both runs, or the path.
    """
    outputs = [os.path.realpath(run.output) for run in runs]
    folders = {run.output.parent for run in runs} - {Path()}
    for number, run in enumerate(runs):
        for key, name in run.sources().items():
            if Path(name).exists() or os.path.realpath(name) in outputs[:number]:
                continue
            what = f"run {number + 1} needs {key} {name}, which"
            if os.path.realpath(name) in outputs:
                maker = outputs.index(os.path.realpath(name)) + 1
                raise RunError(f"{what} run {maker} makes: put that one first")
            # Beside the runs' outputs; another name may be a hub's.
            if Path(name).parent in folders:
                raise RunError(f"{what} is not there and which no run makes; correct the path")
