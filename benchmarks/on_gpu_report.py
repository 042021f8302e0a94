"""Hold figures with their bounds, write them as JSON, and show them as a table."""

from __future__ import annotations

import json
import math
import os
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 1
WIDTH = 100  # columns of the table


@dataclass
class Row:
    """Hold one figure; `value` is None where it was not measured, and `note` says why.

    `at_most` and `at_least` bound the value. A row whose name begins with "gate/" is ok or FAILED.
    Any other row has met or missed a target.
    """

    name: str
    unit: str = ""
    value: float | None = None
    note: str = "not measured"
    at_most: float | None = None
    at_least: float | None = None
    failed: bool = False  # because of an error, not for lack of time, memory or hardware
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """Compare the value with the bounds."""
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


class Report:
    """Hold rows, facts about the machine, and the file for both; without a file write nothing."""

    def __init__(self, rows: Iterable[Row], file: Path | None = None) -> None:
        self.rows = {row.name: row for row in rows}
        self.facts: dict[str, Any] = {}
        self.file = file

    @property
    def failures(self) -> list[str]:
        """Return the names of rows that FAILED."""
        return [row.name for row in self.rows.values() if row.verdict == "FAILED"]

    def verdicts(self, beginning: str) -> set[str]:
        """Return the verdicts of the rows whose names begin with this."""
        return {row.verdict for name, row in self.rows.items() if name.startswith(beginning)}

    def put(
        self, name: str, value: float | None, note: str = "", failed: bool = False, **detail: Any
    ) -> None:
        """Fill in a row's figure, or with None the reason why there is none."""
        row = self.rows.setdefault(name, Row(name))
        row.value, row.failed = value, failed
        row.note = note if value is not None else f"not measured: {note}"
        if value is not None and not math.isfinite(value):  # JSON has no NaN and no infinity
            row.value, row.note, row.failed = None, f"{value} {note}".strip(), True
        row.detail = {
            key: str(item) if isinstance(item, float) and not math.isfinite(item) else item
            for key, item in detail.items()
        }

    def give_up(self, rows: Iterable[Row], reason: str, *, failed: bool = False) -> None:
        """Note why rows without a figure have none."""
        for row in rows:
            if row.note == "not measured":
                self.put(row.name, None, reason, failed)

    def as_json(self) -> dict[str, Any]:
        """Return the content of the file."""
        rows = []
        for row in self.rows.values():
            bounds = (("<=", row.at_most), (">=", row.at_least))
            target = " ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)
            rows.append(asdict(row) | {"target": target, "verdict": row.verdict})
        return {"schema": SCHEMA, **self.facts, "rows": rows}

    def write(self) -> None:
        """Replace the file, so that a kill leaves the old one or the new one."""
        if self.file is not None:
            text = json.dumps(self.as_json(), indent=1, allow_nan=False) + "\n"
            temporary = self.file.with_suffix(".tmp")
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, self.file)


def read(file: Path) -> dict[str, Any]:
    """Return a report's JSON.

    Raises:
        ValueError: the file holds no report.
    """
    found = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or found.get("schema") != SCHEMA or "rows" not in found:
        raise ValueError(f"{file}: no report of schema {SCHEMA}")
    return found


def table(report: Mapping[str, Any]) -> str:
    """Return a report's JSON as plain text of at most 100 columns."""

    def text(value: Any) -> str:
        if isinstance(value, Mapping):
            return ", ".join(f"{key} {text(item)}" for key, item in value.items())
        if isinstance(value, bool) or not isinstance(value, int | float):
            return str(value)
        whole = value == int(value) or abs(value) >= 1e3
        return f"{value:,.0f}" if whole else f"{value:.3g}"

    lines: list[str] = []
    for key, value in report.items():
        if key not in ("schema", "rows"):
            lines += textwrap.wrap(f"{key}: {text(value)}", WIDTH, subsequent_indent="  ")
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in report["rows"]:
        groups.setdefault(row["name"].split("/")[0], []).append(row)
    for group, rows in groups.items():
        keys = list(dict.fromkeys(key for row in rows for key in row["detail"]))
        width = max(len(group), *(len(row["name"]) - len(group) - 1 for row in rows))
        bounded = any(row["target"] for row in rows)
        units = {row["unit"] for row in rows}
        unit = units.pop() if len(units) == 1 else ""  # else each row names its own
        cells = [f"{group:<{width}}", f"{unit:>10}", *(f"{key:>10}" for key in keys)]
        lines += ["", "  ".join([*cells, "  target" * bounded])]
        for row in rows:
            cells = [f"{row['name'].removeprefix(f'{group}/'):<{width}}"]
            if row["value"] is None:
                cells += [f"{row['verdict']:>10}" if row["verdict"] else "", row["note"]]
            else:
                cells += [f"{text(row['value']):>10}" + (f" {row['unit']}" if units else "")]
                cells += [f"{text(row['detail'].get(key, '')):>10}" for key in keys]
                cells += [f"{row['target']:<8}" * bounded, row["verdict"], row["note"]]
            lines.append("  ".join(filter(None, cells)))
    return "\n".join(line[:WIDTH].rstrip() for line in lines)
