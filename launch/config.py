"""YAML and `key=value` overrides -> a typed config; mistakes -> file, key and fix in a sentence."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from pretrain import RunError

Config = TypeVar("Config", bound=BaseModel)
_SHIPPED = "shipped:"  # before the name of a config that was installed with the package


class ConfigError(RunError):
    """A config that cannot be used; one line."""


class _Loader(yaml.SafeLoader):
    """Safe loading that also refuses a key given twice, which YAML would silently drop."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping whose keys differ."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for i, key in enumerate(keys):
            if key in keys[:i]:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key!r} is given twice", problem_mark=node.value[i][0].start_mark
                )
        return super().construct_mapping(node, deep)


def load_config(model: type[Config], path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read `path`, apply `section.key=value` overrides, validate.

    `shipped:NAME.yaml` is a config that was installed with the package.

    Raises:
        ConfigError: with the file, the key and the fix.
    """
    values = _read(path)
    for override in overrides:
        _apply(values, override)
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{path}: {_sentence(model, error)}") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        text = _file(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file{_near(path)}") from None
    except (IsADirectoryError, UnicodeDecodeError, PermissionError) as error:
        raise ConfigError(f"{path}: not a readable text file ({error})") from error
    try:
        values = yaml.load(text, Loader=_Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f" line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}:{line} {error.problem}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML ({' '.join(str(error).split())})") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected `key: value` lines")
    return values


def config_line(path: Path) -> str:
    """Name the file that `load_config` reads, for a line on the screen."""
    file = _file(path).absolute()
    return f"config: {file}" if file.name == path.name else f"config: {path}, {file}"


def _file(path: Path) -> Path:
    if not str(path).startswith(_SHIPPED):
        return path
    name, names = str(path).removeprefix(_SHIPPED), _shipped()
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {_SHIPPED}{close[0]}?" if close else f"there are {', '.join(names)}"
        raise ConfigError(f"{path}: not shipped; {hint}")
    return Path(str(files("configs") / name))


def _shipped() -> list[str]:
    return sorted(file.name for file in files("configs").iterdir() if file.name.endswith(".yaml"))


def _near(path: Path) -> str:
    if path.name in _shipped():
        return f"; did you mean {_SHIPPED}{path.name}?"
    names = [str(p) for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    close = difflib.get_close_matches(str(path), names, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _apply(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"{override!r} is no override; write section.key=value")
    here: Any = values
    for part in parts[:-1]:
        if isinstance(here, list):
            here = here[_index(override, part, here)]
        else:
            if here.get(part) is None:
                here[part] = {}
            here = here[part]
        if not isinstance(here, dict | list):
            raise ConfigError(f"{override!r}: {part} is a single value, it has no keys")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{override!r}: the value is not YAML") from error
    if isinstance(here, list):
        here[_index(override, parts[-1], here)] = value
    else:
        here[parts[-1]] = value


def _index(override: str, part: str, items: list[Any]) -> int:
    if not part.isdigit() or int(part) >= len(items):
        raise ConfigError(f"{override!r}: {part} is no number from 0 to {len(items) - 1}")
    return int(part)


def _sentence(model: type[BaseModel], error: ValidationError) -> str:
    """The first mistake in words; unknown keys first, since they cause the missing ones."""
    known = set(_paths(model.model_json_schema()))

    def rank(entry: Any) -> tuple[bool, int]:
        # A key that is right in another member of a union is no unknown key; of the mistakes that
        # every member of a union has to report, the innermost is in the member that was meant.
        key = _plain(".".join(map(str, _without_tags(model, entry["loc"]))))
        unknown = entry["type"] == "extra_forbidden" and key not in known
        return not unknown, -len(entry["loc"])

    errors = sorted(error.errors(), key=rank)
    first = errors[0]
    key = ".".join(map(str, _without_tags(model, first["loc"])))
    context = first.get("ctx", {})
    if first["type"] == "extra_forbidden":
        text = f"unknown key {key}{_suggestion(model, key)}"
    elif first["type"] == "missing":
        text = f"{key} is missing"
    elif first["type"].startswith("union_tag"):
        name = context["discriminator"].strip("'")
        choices = re.findall(r"'([^']+)'", str(context.get("expected_tags", "")))
        close = difflib.get_close_matches(str(context.get("tag", "")), choices, n=1)
        hint = f"; did you mean {close[0]}?" if close else f"; one of {', '.join(choices)}"
        given = f" {context['tag']!r} is not known" if "tag" in context else " is missing"
        text = f"{key}: {name}{given}{hint if choices else ''}"
    else:
        message = first["msg"].removeprefix("Value error, ")
        message = message[0].lower() + message[1:]
        given = first["input"]
        shown = f" (given: {given!r})" if isinstance(given, str | int | float | bool) else ""
        text = f"{key}: {message}{shown}" if key else message
    more = len(errors) - 1
    return text + (f" (and {more} more)" if more else "")


def _without_tags(model: type[BaseModel], loc: Sequence[Any]) -> list[Any]:
    """Pydantic's location without the names of union members, which no user wrote."""
    names = {path.rpartition(".")[2] for path in _paths(model.model_json_schema())}
    members = {"str", "float", "int", *model.model_json_schema().get("$defs", {})}
    last = len(loc) - 1
    return [
        part
        for i, part in enumerate(loc)
        if isinstance(part, int) or part in names or (i == last and not _member(part, members))
    ]


def _member(part: str, members: set[str]) -> bool:
    return part in members or part.startswith("tuple[")


def _suggestion(model: type[BaseModel], key: str) -> str:
    parent, _, name = key.rpartition(".")
    paths = sorted(set(_paths(model.model_json_schema())))
    beside = [path for path in paths if path.rpartition(".")[0] == _plain(parent)]
    for candidates in (beside, paths):
        by_name = {path.rpartition(".")[2]: path for path in reversed(candidates)}
        close = difflib.get_close_matches(name, by_name, n=1)
        if close:
            return f"; did you mean {by_name[close[0]]}?"
    return f"; known here: {', '.join(p.rpartition('.')[2] for p in beside)}" if beside else ""


def _plain(key: str) -> str:
    return ".".join(part for part in key.split(".") if not part.isdigit())


def _paths(schema: dict[str, Any]) -> Iterator[str]:
    """The dotted path of every key a JSON schema knows."""
    definitions = schema.get("$defs", {})

    def walk(node: dict[str, Any], prefix: str) -> Iterator[str]:
        if "$ref" in node:
            yield from walk(definitions[node["$ref"].rpartition("/")[2]], prefix)
        for name, child in node.get("properties", {}).items():
            yield prefix + name
            yield from walk(child, f"{prefix}{name}.")
        for choice in (*node.get("anyOf", ()), *node.get("oneOf", ()), *node.get("allOf", ())):
            yield from walk(choice, prefix)
        if isinstance(node.get("items"), dict):
            yield from walk(node["items"], prefix)

    yield from walk(schema, "")
