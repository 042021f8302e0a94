"""Load a typed config from YAML and `key=value` overrides; explain a mistake in one sentence."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from data_prep.disk.json_files import NotRegularError, read_regular_text
from data_prep.keys import Keys
from data_prep.messages import one_line
from launch.explain import explain, model_of, other_kind, unread
from pretrain import RunError
from pretrain.config import RunConfig

Config = TypeVar("Config", bound=BaseModel)
_SHIPPED = "shipped:"  # before the name of a config that was installed with the package

_OTHERS = ("int", "float", "timestamp")  # tags that YAML 1.1 gives by looks
_DEEPEST = 20  # levels
_DIGITS = 30
_SHOWN, _LONGEST = 60, 300  # characters of what was given, and of a parser's message
_CHARACTERS = re.compile(r"[^\0\ud800-\udfff]*")
_NUMBERS = {
    "int": r"[-+]?[0-9][0-9_]*",
    "float": r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)"
    r"|\.(?:nan|NaN|NAN)",
}


class ConfigError(RunError):
    """Report a config that cannot be used, in one line."""


def invalid(where: Any, problem: str) -> yaml.MarkedYAMLError:
    """Return the error that names the line of a YAML event or node."""
    return yaml.MarkedYAMLError(problem=problem, problem_mark=where.start_mark)


class _Loader(yaml.SafeLoader):
    """Load YAML safely, and refuse what YAML 1.1 would drop or read as something else.

    A key given twice is an error. Numbers are decimal: 1e-6 is one, 1:30 and dates are text, and
    010 (octal 8) is an error. So are aliases, deep nesting and characters that no path can hold.
    """

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse aliases and deep nesting."""
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise invalid(event, f"the alias *{event.anchor}: write it out")
        if self.depth >= _DEEPEST:
            raise invalid(event, f"nested more than {_DEEPEST} deep")
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse a key that is given twice."""
        seen = set()
        for key, _ in node.value:
            name = (key.tag, str(key.value))
            if name in seen:
                raise invalid(key, f"key {key.value!r} is given twice")
            seen.add(name)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """Add a line number to an error of a constructor; refuse characters that no text has."""
        try:
            value = super().construct_object(node, deep)
        except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
            kind = node.tag.rpartition(":")[2]
            shown = one_line(str(node.value), _SHOWN)
            raise invalid(node, f"{shown!r} is not a valid {kind}") from error
        if isinstance(value, str) and not _CHARACTERS.fullmatch(value):
            raise invalid(node, "a character that no text has (NUL, or half of a surrogate pair)")
        return value

    def construct_yaml_int(self, node: Any) -> int:
        """Read an integer as a decimal number."""
        text = self.construct_scalar(node)
        if re.fullmatch(r"[-+]?0[0-9_]+", text):
            shown = one_line(text, _SHOWN)
            raise invalid(node, f"{shown} has a leading zero; leave it out, or put text in quotes")
        if len(text) > _DIGITS:
            raise invalid(node, f"a number of {len(text)} digits")
        return int(text)


# YAML 1.1 reads 1:30 as 90 and 1e-6 as text. Its own rules for numbers and dates go; ours follow.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in _OTHERS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _kind, _pattern in _NUMBERS.items():
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_kind}", re.compile(f"(?:{_pattern})$"), list("-+.0123456789")
    )
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def load_config(
    model: type[Config], path: Path | Mapping[str, Any], overrides: Sequence[str] = ()
) -> Config:
    """Read `path`, or take its content; apply `section.key=value` overrides, validate.

    `shipped:NAME.yaml` is a config that was installed with the package, and as a value
    `shipped:NAME` is a folder of it.

    Raises:
        ConfigError: names the file, the key and the fix.
    """
    where = Path("config") if isinstance(path, Mapping) else path
    values = copy.deepcopy(dict(path)) if isinstance(path, Mapping) else _read(path)
    for override in overrides:
        _apply(values, override)
    try:
        values = _with_folders(values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    if (command := other_kind(model, values, where)) is not None:
        raise ConfigError(f"{where}: this {command}")
    try:
        config = model.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{where}: {explain(model, values, error)}") from error
    if problem := unread(config, values):
        raise ConfigError(f"{where}: {problem}")
    return config


def as_yaml(values: dict[str, Any]) -> str:
    """Return values as a config file would have them, in their order."""
    text: str = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    return text


def kind_of(path: Path, overrides: Sequence[str] = ()) -> type[Keys]:
    """Return the class of the keys in a file: of a recipe, a corpus, examples or a run.

    Raises:
        ConfigError: it cannot be read.
    """
    values = _read(path)
    for override in overrides:
        _apply(values, override)
    return model_of(values) or RunConfig


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a YAML file; ConfigError if it is none."""
    try:
        text = read_regular_text(find_shipped(path))
    except NotRegularError:
        raise ConfigError(f"{path}: not a readable text file") from None
    except FileNotFoundError:
        names = [str(p) for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        close = difflib.get_close_matches(str(path), names, n=1)
        if path.name in _shipped():
            close = [f"{_SHIPPED}{path.name}"]
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"{path}: no such file{hint}") from None
    except (UnicodeDecodeError, PermissionError) as error:
        raise ConfigError(f"{path}: not a readable text file ({error})") from error
    values = parse(f"{path}:", text)
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected `key: value` lines")
    return values


def _with_folders(value: Any) -> Any:
    """Replace each `shipped:NAME` among the values by the path of that folder."""
    if isinstance(value, dict):
        return {key: _with_folders(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_folders(inner) for inner in value]
    return (
        str(find_shipped(Path(value)))
        if isinstance(value, str) and value.startswith(_SHIPPED)
        else value
    )


def config_line(path: Path) -> str:
    """Name the file that `load_config` reads, for a line on the screen."""
    file = find_shipped(path).absolute()
    return f"config: {file}" if file.name == path.name else f"config: {path}, {file}"


def find_shipped(path: Path) -> Path:
    """Return the file behind `path`, which may be `shipped:NAME.yaml`."""
    if not str(path).startswith(_SHIPPED):
        return path
    name, files = str(path).removeprefix(_SHIPPED), _shipped()
    if name not in files:
        close = difflib.get_close_matches(name, files, n=1)
        hint = f"did you mean {_SHIPPED}{close[0]}?" if close else f"there are {', '.join(files)}"
        raise ConfigError(f"{path}: not shipped; {hint}")
    return files[name]


def _shipped() -> dict[str, Path]:
    """Return shipped configs and folders by name: of an installed wheel, or of a checkout."""
    here = Path(__file__).resolve().parent
    folder = here / "shipped"
    folder = folder if folder.is_dir() else here.parent / "configs"
    return {path.name: path for path in sorted(folder.iterdir()) if path.name[0] not in "._"}


def parse(where: str, text: str) -> Any:
    """Parse YAML; an error message begins with `where`."""
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f" line {mark.line + 1}" if mark else ""
        problem = one_line(error.problem or error.context or "not YAML", _LONGEST)
        raise ConfigError(f"{where}{line} {problem}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} not YAML ({one_line(str(error), _LONGEST)})") from error


def _apply(values: dict[str, Any], override: str) -> None:
    """Set one `section.key=value` in `values`; a number in the key is an index of a list.

    A sweep has keys with dots: `runs.1.sweep.train.seed=[0]` replaces its `train.seed`.
    """
    dotted, equals, text = override.partition("=")
    parts = dotted.strip().split(".")
    shown = repr(one_line(override, _SHOWN))
    if not equals or not all(parts):
        raise ConfigError(f"{shown} is not an override; write section.key=value")
    here: Any = values
    for depth, part in enumerate(parts):
        rest = ".".join(parts[depth:])
        whole = isinstance(here, dict) and rest in here
        key: Any = rest if whole else part
        if isinstance(here, list):
            if not re.fullmatch("[0-9]{1,9}", part) or int(part) >= len(here):
                raise ConfigError(
                    f"{shown}: {one_line(part, _SHOWN)} is not a number from 0 to {len(here) - 1}"
                )
            key = int(part)
        if whole or depth == len(parts) - 1:
            here[key] = parse(f"{shown}:", text)
            return
        if isinstance(here, dict) and here.get(key) is None:
            here[key] = {}
        here = here[key]
        if not isinstance(here, dict | list):
            raise ConfigError(f"{shown}: {part} is a single value, it has no keys")
