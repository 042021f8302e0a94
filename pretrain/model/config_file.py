"""Read config.json and other settings of a model's folder, without torch and without running code.

In every function the message of a RunError begins with `who`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_prep.disk.json_files import (
    NotRegularError,
    TooLargeError,
    parse_object,
    read_regular_text,
)
from data_prep.messages import first_line
from pretrain import RunError

# Keys that make transformers import, fetch or replace code; a leading underscore hides none.
_CODE = (
    *("auto_map", "attn_implementation", "experts_implementation", "custom_generate"),
    *("quantization_config", "fusion_config", "kernel_config"),
)
_LONGEST = 2**24  # bytes


def read_text(who: str, path: Path, limit: int) -> str:
    """Return a text file's content; RunError if it is not a file, or larger than any model's."""
    try:
        return read_regular_text(path, limit)
    except (FileNotFoundError, NotRegularError):
        raise RunError(f"{who}: {path} is not a file; copy or download it again") from None
    except UnicodeDecodeError as error:
        raise RunError(
            f"{who}: {path} is not UTF-8 text ({first_line(error)}); copy or download it again"
        ) from None
    except TooLargeError as error:
        raise RunError(
            f"{who}: {path.name} {error.strerror}, more than the {limit:,} of any model"
        ) from None


def read_config(who: str, folder: Path) -> dict[str, Any]:
    """Return the config.json of a folder; refuse one that could run code."""
    path = folder / "config.json"
    if not path.is_file():
        raise RunError(f"{who}: there is no {path}; check the path")
    return read_json(who, path)


def read_json(who: str, path: Path) -> dict[str, Any]:
    try:
        raw = parse_object(read_text(who, path, _LONGEST))
    except RunError:
        raise
    except ValueError as error:
        raise RunError(f"{who}: {path} is {first_line(error)}") from error
    for key in _keys(raw):
        if key.lstrip("_").startswith(_CODE):
            raise RunError(
                f"{who}: {path.name} holds {key!r}, which could run code; take the key out if the "
                "model needs none, or take another model"
            )
    return raw


def _keys(value: object) -> Iterator[str]:
    """Yield the keys of an object and of the objects in it."""
    if isinstance(value, dict):
        yield from value
        for inner in value.values():
            yield from _keys(inner)
