"""Define a recipe: stages that are made one after the other and name each other's output."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from data_prep.config import CorpusConfig
from data_prep.keys import Keys
from pretrain.config import RunConfig
from pretrain.objectives.known import objective_kind, unread_keys, with_objective


class TrainKeys(RunConfig):
    """Hold the keys of a run, and the recipe's own."""

    stage: Literal["train"] = "train"


class PrepareKeys(CorpusConfig):
    """Hold the keys of a corpus, and the recipe's own."""

    stage: Literal["prepare"] = "prepare"


class EvaluateKeys(Keys):
    """Configure a measurement of a recipe, as `distil evaluate MODELS --data DATA` makes it."""

    stage: Literal["evaluate"] = "evaluate"
    output: Path
    models: tuple[str, ...] = Field(min_length=1)
    data: Path  # shards, or a table of pairs
    teacher: str | None = None
    rows: int | None = Field(None, ge=1)
    same_vocabulary: bool = False


class ExportKeys(Keys):
    """Configure an export of a recipe: `run` is written to `output`."""

    stage: Literal["export"] = "export"
    output: Path
    run: Path


Entry = Annotated[TrainKeys | PrepareKeys | EvaluateKeys | ExportKeys, Field(discriminator="stage")]


class Recipe(Keys):
    """Hold the stages of a recipe in their order; an entry without `stage:` is a training run.

    `defaults` are the keys that all training runs share; a run's own keys come on top. A run whose
    objective does not read one of them is without it. A later stage may name the output of an
    earlier one.
    """

    defaults: dict[str, Any] = Field({}, exclude=True)
    runs: tuple[Entry, ...] = Field(min_length=1)

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
        if isinstance(own, dict) and own.setdefault("stage", "train") != "train":
            found.append(own)
            continue
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
