"""Change shipped configs at random: each is refused in one line, or planned."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.processes import ROOT

NUMBER = 400 if os.environ.get("DISTIL_TORTURE") else 30
VALUES: list[Any] = [
    *(None, True, -1, 0, 2.5, 1e30, float("nan"), 10**40),
    *("", "x", "../..", "/nowhere", "~", "\u0000", "0.5", "{}", "shipped:nothing.yaml"),
    *([], [[]], [None], {}, {"a": {"b": 1}}, {"name": "mlm"}, {"stage": "train"}),
]


def places(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the keys that lead to each value."""
    if before:
        yield before
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in keys:
        yield from places(value[key], (*before, key))


def mutated(values: Any, draw: random.Random) -> Any:
    """Set, remove, rename or double one entry."""
    *above, last = draw.choice([*places(values)])
    inner = values
    for key in above:
        inner = inner[key]
    change = draw.choice(["set", "set", "set", "remove", "rename", "double"])
    if change == "set":
        inner[last] = copy.deepcopy(draw.choice(VALUES))
    elif change == "remove":
        del inner[last]
    elif change == "rename" and isinstance(inner, dict):
        inner[f"{last}x"] = inner.pop(last)
    elif change == "double" and isinstance(inner, list):
        inner.append(copy.deepcopy(inner[last]))
    return values


def command_of(values: Any) -> str:
    """Return the command that reads such a file."""
    if not isinstance(values, dict) or "runs" in values:
        return "recipe"
    of_task = "task" in values and "train" in values and not isinstance(values["train"], dict)
    return "prepare" if "sources" in values or of_task else "pretrain"


@pytest.mark.slow
def test_a_changed_config_is_refused_in_one_line_or_planned(
    distil: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    draw, files = random.Random(54), sorted((ROOT / "configs").glob("*.yaml"))
    codes = []
    for number in range(NUMBER):
        file = draw.choice(files)
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
        for _ in range(draw.randint(1, 2)):
            values = mutated(values, draw) if values else values
        Path("m.yaml").write_text(yaml.safe_dump(values, allow_unicode=True), encoding="utf-8")
        code, _, err = distil(command_of(values), "m.yaml", "--dry-run")
        assert code in (0, 2) and "Traceback" not in err, (number, file.name, err)
        assert err.count("error:") == (code == 2), (number, file.name, err)
        codes.append(code)
    assert codes.count(2) > NUMBER / 2
