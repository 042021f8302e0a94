"""Define a recipe: runs that are trained one after the other and name each other's output."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from data_prep.keys import Keys
from pretrain.config import RunConfig


class Recipe(Keys):
    """Hold the runs of a recipe in their order.

    `defaults` are the keys that all runs share; a run's own keys come on top. `teacher`,
    `student.init` and `resume_from` of a later run may name the output of an earlier one.
    """

    defaults: dict[str, Any] = Field({}, exclude=True)
    runs: tuple[RunConfig, ...] = Field(min_length=1)

    @model_validator(mode="before")
    @classmethod
    def with_defaults(cls, values: Any) -> Any:
        """Fill the shared keys into each run, so that a mistake in them is named with its path."""
        if not isinstance(values, dict) or not isinstance(runs := values.get("runs"), list):
            return values
        shared = values.get("defaults") or {}
        return {**values, "runs": [merged(shared, run) for run in runs]}

    @model_validator(mode="after")
    def outputs_differ(self) -> Recipe:
        """Refuse two runs that would write to one folder."""
        outputs = [str(run.output) for run in self.runs]
        if twice := [output for output in outputs if outputs.count(output) > 1]:
            raise ValueError(f"two runs have the output {twice[0]}: each needs its own")
        return self


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
