"""Define the base class of every section of a config file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, model_validator


class Keys(BaseModel):
    """Hold keys of a config file: frozen, none unknown, no value converted to another type.

    By itself pydantic reads true as 1, "010" as 10 and inf as a number, and an empty path is the
    working directory.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _of_their_kinds(cls, values: Any) -> Any:
        """Spell a value of the wrong kind so that its own field refuses it, and names it."""
        if not isinstance(values, dict):
            return values
        return {name: cls._spelt(name, value) for name, value in values.items()}

    @classmethod
    def _spelt(cls, name: Any, value: Any) -> Any:
        if name not in cls.model_fields:
            return value
        kinds = set(_kinds(cls.model_fields[name].annotation))
        if value == "" and Path in kinds:
            return None
        if not kinds & {int, float} or bool in kinds:
            return value
        is_text = any(kind is str or isinstance(kind, str) for kind in kinds)

        def spelt(item: Any) -> Any:
            wrong = isinstance(item, bool) or (not is_text and _is_quoted_number(item))
            return repr(item) if wrong else item

        return [*map(spelt, value)] if isinstance(value, list | tuple) else spelt(value)


def _kinds(annotation: Any) -> Iterator[Any]:
    """Yield every type and every literal string that an annotation names."""
    for part in get_args(annotation):
        yield from _kinds(part)
    if isinstance(annotation, type | str):
        yield annotation


def _is_quoted_number(value: Any) -> bool:
    try:
        return isinstance(value, str) and float(value) is not None
    except ValueError:
        return False
