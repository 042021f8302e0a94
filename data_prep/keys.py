"""Define the base class of every section of a config file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, model_validator

_SMALLEST = 1e-20


class Keys(BaseModel):
    """Hold keys of a config file: frozen, none unknown, no value converted to another type.

    By itself pydantic reads true as 1, "010" as 10 and inf as a number, and an empty path is the
    working directory. A number of 1e-300, which is 0 in a model's precision, is refused, too.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_types(cls, values: Any) -> Any:
        """Replace a value of the wrong type by its spelling, which its own field then refuses."""
        if not isinstance(values, dict):
            return values

        checked = {}
        for name, value in values.items():
            field = cls.model_fields.get(name)
            kinds = set(_kinds(field.annotation)) if field is not None else set()
            if value == "" and Path in kinds:
                value = None
            elif kinds & {int, float} and bool not in kinds:
                is_text = any(kind is str or isinstance(kind, str) for kind in kinds)
                several = isinstance(value, list | tuple)
                items = list(value) if several else [value]
                for place, item in enumerate(items):
                    wrong = isinstance(item, bool)
                    if isinstance(item, float) and 0 < abs(item) < _SMALLEST:
                        raise ValueError(f"{name} {item:g} is too small: give a larger number")
                    if isinstance(item, str) and not is_text:
                        with suppress(ValueError):
                            wrong = float(item) is not None  # a number in quotes
                    items[place] = repr(item) if wrong else item
                value = items if several else items[0]
            checked[name] = value
        return checked


def _kinds(annotation: Any) -> Iterator[Any]:
    """Yield every type and every literal string that an annotation names."""
    for part in get_args(annotation):
        yield from _kinds(part)
    if isinstance(annotation, int):  # the value of a literal
        yield type(annotation)
    if isinstance(annotation, type | str):
        yield annotation
