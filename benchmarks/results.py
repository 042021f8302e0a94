"""Write what was measured, from the records in docs/results, where people read it.

    python benchmarks/results.py [--check]      (`make results`)

The records are appended by `--record` of `distil evaluate`, `demo`, `bench` and `prepare`, and of
benchmarks/peers.py. From them come docs/results.md with its plot, the blocks of README.md between
`<!-- NAME -->` and `<!-- end -->`, and the lines `# Measured:` in the headers of configs. With
--check nothing is written, and a file that differs is an error.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from benchmarks.result_texts import BLOCKS, HEADERS, PLOT, SECTIONS, Curve

ROOT = Path(__file__).resolve().parents[1]
_REFERENCE = re.compile(r"\{([^{}/]+)/([^{}/]+)/([^{}/]+?)(%?)\}")  # file/model/figure
_SEED = re.compile(r"-seed[0-9]+$")
_FIELDS = ("tokens", "cpu_seconds")  # of a row that are shown like figures


class Row(NamedTuple):
    """Hold a figure of a model, of all seeds that were measured."""

    values: list[float]
    low: float | None  # the interval of a single value
    high: float | None

    def text(self, percent: bool = False) -> str:
        """Return the mean, with the range of the seeds or the interval of one."""
        first = mean(self.values)
        digits = 0 if abs(first) >= 100 else 3 if isinstance(first, float) and first < 1 else 1
        scale, unit = (100, " %") if percent else (1, "")
        digits = 1 if percent else digits

        def number(value: float) -> str:
            return f"{value * scale:,.{digits}f}"

        if len(self.values) > 1:
            return f"{number(first)}{unit} ({number(min(self.values))} to {number(max(self.values))})"
        if self.low is None or self.high is None:
            return number(first).removesuffix(".0") + unit
        return f"{number(first)}{unit} ±{number(max(self.high - first, first - self.low))}"


class Records:
    """Read all records, and look figures up in them.

    A later record replaces an earlier one of the same model, seed and figure.
    """

    def __init__(self, folder: Path) -> None:
        self.of_file: dict[str, list[dict[str, Any]]] = {
            file.stem: json.loads(file.read_bytes()) for file in sorted(folder.glob("*.json"))
        }

    def rows(self, file: str) -> dict[str, dict[str, Row]]:
        """Return the figures of each model at its last step, in the order they were recorded.

        Raises:
            ValueError: two models were compared on different data.
        """
        last: dict[tuple[str, Any], dict[str, Any]] = {}
        data: dict[str, Any] = {}
        for record in self.of_file[file]:
            for row in record["rows"]:
                key = _SEED.sub("", row["model"]), row.get("seed")
                before = last.get(key, {"figures": {}})
                if row.get("step", 0) < before.get("step", 0):
                    continue
                last[key] = {**before, **row, "figures": {**before["figures"], **row["figures"]}}
                if record["data"] is not None and file != "corpora":
                    for name in row["figures"]:
                        if data.setdefault(name, record["data"]) != record["data"]:
                            raise ValueError(f"{file}.json: {name} was measured on different data")
        found: dict[str, dict[str, list[list[float]]]] = {}
        for (name, _), row in last.items():
            figures = found.setdefault(name, {})
            fields = {key: [row[key]] for key in _FIELDS if key in row}
            for figure, numbers in {**row["figures"], **fields}.items():
                figures.setdefault(figure, []).append(numbers)
        return {
            name: {
                figure: Row([v[0] for v in all_], *(all_[0][1:] if len(all_[0]) == 3 else (None, None)))
                for figure, all_ in figures.items()
            }
            for name, figures in found.items()
        }

    def fill(self, text: str) -> str:
        """Replace each {file/model/figure} by its value; with % after it as a percentage.

        Raises:
            ValueError: there is no such record.
        """

        def value(found: re.Match[str]) -> str:
            file, model, figure, percent = found.groups()
            try:
                return self.rows(file)[model][figure].text(bool(percent))
            except KeyError:
                raise ValueError(f"no record in docs/results has {found[0]}") from None

        return _REFERENCE.sub(value, text)

    def curve(self, curve: Curve) -> list[tuple[float, float]]:
        """Return (tokens, value) of every checkpoint of a run that was measured."""
        rows = [row for record in self.of_file[curve.file] for row in record["rows"]]
        return sorted(
            (row["tokens"], row["figures"][curve.figure][0])
            for row in rows
            if row["model"] == curve.model and curve.figure in row["figures"]
        )


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def page(records: Records) -> str:
    """Return docs/results.md."""
    parts = ["# Results", "Written by `make results` from the records in `docs/results`: do not edit.", ""]
    for section in SECTIONS:
        if section.file not in records.of_file:
            parts += [f"## {section.title}", f"{section.text} Not measured.", ""]
            continue
        found = records.rows(section.file)
        names = dict.fromkeys([*(n for n in section.labels if n in found), *found])
        columns = dict.fromkeys(figure for name in names for figure in found[name])
        rows = [
            [
                section.labels.get(name, name),
                *(found[name][c].text() if c in found[name] else "" for c in columns),
            ]
            for name in names
        ]
        heads = [column.replace("_", " ").replace("cpu", "CPU") for column in columns]
        parts += [f"## {section.title}", records.fill(section.text)]
        if section.file == PLOT.file:
            parts += ["", f"![{PLOT.title}](results/{PLOT.file}.svg)"]
        parts += ["", table(["", *heads], rows), "", "Measured by:", ""]
        for record in records.of_file[section.file]:
            machine = record["hardware"].get("gpu") or (
                f"{record['hardware']['processor']}, {record['hardware']['threads']} threads"
            )
            line = f"- {record['date']}, commit {record['commit']}, {machine}: `{record['command']}`"
            if line not in parts:
                parts.append(line)
        parts.append("")
    return "\n".join(parts)


def plot(records: Records) -> str:
    """Return the plot as SVG: curves over tokens, and horizontal lines for what does not train."""
    width, height, left, right, top, bottom = 720, 330, 60, 200, 36, 46
    curves = {curve.label: records.curve(curve) for curve in PLOT.curves}
    lines = {
        text: mean(records.rows(PLOT.file)[model][PLOT.figure].values)
        for model, text in PLOT.lines.items()
    }
    values = [y for points in curves.values() for _, y in points] + list(lines.values())
    most = max(x for points in curves.values() for x, _ in points)
    low, high = min(values) - 0.02, max(values) + 0.02

    def x_of(tokens: float) -> float:
        return left + (width - left - right) * tokens / most

    def y_of(value: float) -> float:
        return top + (height - top - bottom) * (high - value) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{left}" y="20" font-weight="bold">{PLOT.title}</text>',
    ]
    step = 0.1 if high - low > 0.35 else 0.05
    for i in range(int(low / step) + 1, int(high / step) + 1):
        y = y_of(i * step)
        parts.append(f'<path d="M{left} {y:.1f}H{width - right}" stroke="#dddddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{i * step:.2f}</text>')
    for i in range(5):
        x = x_of(most * i / 4)
        parts.append(
            f'<text x="{x:.1f}" y="{height - 24}" text-anchor="middle">{most * i / 4 / 1000:,.0f}k</text>'
        )
    middle = (left + width - right) / 2
    parts.append(f'<text x="{middle}" y="{height - 6}" text-anchor="middle">{PLOT.x_label}</text>')
    labels = []
    for text, value in lines.items():
        y = y_of(value)
        parts.append(
            f'<path d="M{left} {y:.1f}H{width - right}" stroke="#888888" stroke-dasharray="5 4"/>'
        )
        labels.append((y, "#555555", text))
    for colour, (text, points) in zip(("#0b62a4", "#c25400"), curves.items(), strict=False):
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        labels.append((y_of(points[-1][1]), colour, text))
    # Labels that would overlap move down.
    lowest = -99.0
    for y, colour, text in sorted(labels):
        lowest = max(y, lowest + 16)
        parts.append(f'<text x="{width - right + 8}" y="{lowest + 4:.1f}" fill="{colour}">{text}</text>')
    return "\n".join([*parts, "</svg>", ""])


def readme(records: Records, text: str) -> str:
    """Return README.md with its blocks filled in."""
    for name, block in BLOCKS.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise ValueError(f"README.md has no block <!-- {name} --> ... <!-- end -->")
        filled = records.fill(block).strip()
        text = pattern.sub(lambda found, filled=filled: f"{found[1]}{filled}\n{found[2]}", text)  # type: ignore[misc]
    return text


def header(records: Records, template: str, text: str) -> str:
    """Return a config with the lines `# Measured:` of its header, which end the header."""
    lines = text.splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    head = lines[:end]
    begin = next((i for i, line in enumerate(head) if line.startswith("# Measured:")), end)
    filled = textwrap.wrap(f"Measured: {records.fill(template)}", 96)
    return "\n".join([*head[:begin], *(f"# {line}" for line in filled), *lines[end:], ""])


def outputs(root: Path, records: Records) -> Iterator[tuple[Path, str]]:
    """Yield each file that holds results, and what it should hold."""
    yield root / "docs" / "results.md", page(records)
    yield root / "docs" / "results" / f"{PLOT.file}.svg", plot(records)
    file = root / "README.md"
    yield file, readme(records, file.read_text(encoding="utf-8"))
    for name, template in HEADERS.items():
        file = root / "configs" / name
        yield file, header(records, template, file.read_text(encoding="utf-8"))


def main(arguments: Sequence[str]) -> int:
    """Write the files, or name those that differ; return the exit code."""
    differ = []
    for file, text in outputs(ROOT, Records(ROOT / "docs" / "results")):
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            differ.append(str(file.relative_to(ROOT)))
            if "--check" not in arguments:
                file.write_text(text, encoding="utf-8")
    if differ and "--check" in arguments:
        print(f"not what the records hold: {', '.join(differ)}; run make results", file=sys.stderr)
        return 1
    print(f"written: {', '.join(differ)}" if differ else "nothing changed")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
