"""Rows of figures: what each stands for, what was measured of it, and why not if not.

A report is JSON, rewritten whole after every row, so that a run that is cut off leaves what it has.
"""

from __future__ import annotations

import json
import math
import os
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

SCHEMA = 1
_WIDTH = 100

Verdict = Literal["", "ok", "FAILED", "met", "missed"]


@dataclass
class Row:
    """One figure; `value` is None where it was not measured, and `note` says why.

    `at_most` and `at_least` bound it: a gate (its name begins with "gate/") is ok or FAILED by them
    and decides whether the rest can be believed; any other row has met or missed a target.
    """

    name: str
    unit: str = ""
    value: float | None = None
    note: str = "not measured"
    at_most: float | None = None
    at_least: float | None = None
    failed: bool = False  # an error, not a lack of time, memory or hardware, is why
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """By the bounds."""
        if self.failed:
            return "FAILED"
        if self.value is None or (self.at_most is None and self.at_least is None):
            return ""
        good = (self.at_most is None or self.value <= self.at_most) and (
            self.at_least is None or self.value >= self.at_least
        )
        if self.name.startswith("gate/"):
            return "ok" if good else "FAILED"
        return "met" if good else "missed"

    @property
    def target(self) -> str:
        """The bound as text."""
        bounds = (("<=", self.at_most), (">=", self.at_least))
        return " ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)


class Report:
    """All rows of a plan with what is known of them."""

    def __init__(self, rows: Iterable[Row], file: Path | None = None) -> None:
        self.rows = {row.name: row for row in rows}
        self.facts: dict[str, Any] = {}
        self.file = file

    def put(
        self,
        name: str,
        value: float | None,
        note: str = "",
        *,
        failed: bool = False,
        **detail: Any,
    ) -> Row:
        """A row's figure, or with None the reason why there is none."""
        row = self.rows.setdefault(name, Row(name))
        row.value, row.note = value, note if value is not None else f"not measured: {note}"
        row.failed = failed
        row.detail = {key: _finite(of_key) for key, of_key in detail.items()}
        if value is not None and not math.isfinite(value):  # which JSON has no word for
            row.value, row.note, row.failed = None, f"{value} {note}".strip(), True
        self.write()
        return row

    def give_up(self, names: Iterable[str], reason: str, *, failed: bool = False) -> list[Row]:
        """Say why rows without a figure have none; returns them."""
        left = [row for row in map(self.rows.__getitem__, names) if row.note == "not measured"]
        for row in left:
            row.note, row.failed = f"not measured: {reason}", failed
        self.write()
        return left

    @property
    def failures(self) -> list[str]:
        """The names of rows that FAILED."""
        return [row.name for row in self.rows.values() if row.verdict == "FAILED"]

    def as_json(self) -> dict[str, Any]:
        """The whole, as the file has it."""
        rows = [
            asdict(row) | {"target": row.target, "verdict": row.verdict}
            for row in self.rows.values()
        ]
        return {"schema": SCHEMA, **self.facts, "rows": rows}

    def write(self) -> None:
        """Replace the file, so that a kill leaves the old one or the new one."""
        if self.file is None:
            return
        text = json.dumps(self.as_json(), indent=1, allow_nan=False) + "\n"
        beside = self.file.with_suffix(".tmp")
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, self.file)


def read(file: Path) -> dict[str, Any]:
    """A report's JSON.

    Raises:
        ValueError: the file is none.
    """
    found = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or found.get("schema") != SCHEMA or "rows" not in found:
        raise ValueError(f"{file}: no report of schema {SCHEMA}")
    return found


def table(report: Mapping[str, Any]) -> str:
    """A report's JSON as plain text of at most 100 columns."""
    lines: list[str] = []
    for key, value in report.items():
        if key not in ("schema", "rows"):
            text = f"{key}: {_text(value)}"
            lines += textwrap.wrap(text, _WIDTH, subsequent_indent="  ")
    for group, rows in groupby(report["rows"], lambda row: row["name"].split("/")[0]):
        lines += ["", *_group(group, list(rows))]
    return "\n".join(line[:_WIDTH].rstrip() for line in lines)


def _group(group: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    keys = list(dict.fromkeys(key for row in rows for key in row["detail"]))
    names = [row["name"].removeprefix(f"{group}/") for row in rows]
    width = max(map(len, [group, *names]))
    bounded = any(row["target"] for row in rows)
    units = {row["unit"] for row in rows}
    head = [f"{group:<{width}}", f"{units.pop() if len(units) == 1 else '':>10}"]
    head += [f"{key:>10}" for key in keys] + ["  target" * bounded]
    lines = ["  ".join(head)]
    for name, row in zip(names, rows, strict=True):
        cells = [f"{name:<{width}}"]
        if row["value"] is None:
            cells += [f"{row['verdict']:>10}" if row["verdict"] else "", row["note"]]
        else:
            several = row["unit"] if len(units) else ""
            cells += [f"{_text(row['value']):>10}{several and ' ' + several}"]
            cells += [f"{_text(row['detail'].get(key, '')):>10}" for key in keys]
            cells += [f"{row['target']:<8}" * bounded, row["verdict"], row["note"]]
        lines.append("  ".join(filter(None, cells)))
    return lines


def slug(text: str) -> str:
    """For a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(of_key)}" for key, of_key in value.items())
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if value == int(value) or abs(value) >= 1e3:
        return f"{value:,.0f}"
    return f"{value:.3g}"
