"""List the objectives that a config may name."""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import Field

from pretrain.objectives.distilbert import DistilBert
from pretrain.objectives.embedding import Embedding
from pretrain.objectives.minilm import MiniLM
from pretrain.objectives.mlm import MaskedLanguageModel
from pretrain.objectives.objective import Objective as AnyObjective
from pretrain.objectives.tinybert import TinyBert

Objective = Annotated[
    DistilBert | Embedding | MiniLM | TinyBert | MaskedLanguageModel, Field(discriminator="name")
]
OBJECTIVES = get_args(get_args(Objective)[0])


def with_objective(values: Any) -> Any:
    """Fill in the name of the objective, and its share of masked tokens.

    `objective: {kl: 0}` means DistilBERT, like no `objective:`.
    """
    if not isinstance(values, dict) or not isinstance(values.get("objective", {}), dict):
        return values
    objective = {"name": DistilBert().name, **values.get("objective", {})}
    values = {**values, "objective": objective}
    kind, masking = objective_kind(values), values.get("masking", {})
    if kind is not None and not kind.corrupts and isinstance(masking, dict):
        values["masking"] = {"probability": 0.0, **masking}
    return values


def unread_keys(kind: type[AnyObjective] | AnyObjective) -> dict[str, str]:
    """Return the keys of a run that an objective does not read, each with what it lacks."""
    found: dict[str, str] = {}
    if not kind.needs_teacher:
        found |= dict.fromkeys(("teacher", "teacher_vocabulary", "student"), "has no teacher")
    if not kind.compares_documents:
        found["vectors"] = "compares no sentence vectors"
        if kind.needs_teacher:
            found["model"] = "takes the teacher's widths"
    return found


def objective_kind(values: Any) -> type[AnyObjective] | None:
    """Return the class of the objective that the values of a run name; None if there is none."""
    kinds = {kind.model_fields["name"].default: kind for kind in OBJECTIVES}
    section = values.get("objective", {})
    return (
        kinds.get(str(section.get("name", DistilBert().name)))
        if isinstance(section, dict)
        else None
    )
