"""Write what was measured, from the records in docs/results, where people read it.

    python benchmarks/results.py [--check]      (`make results`)

The records are appended by `--record` of `distil evaluate`, `demo`, `bench` and `prepare`, and of
benchmarks/peers.py; docs/results/texts.yaml says where their figures stand: in docs/results.md with
its plot, in the blocks of README.md between `<!-- NAME -->` and `<!-- end -->`, and in the lines
`# Measured:` that end the headers of configs. With --check nothing is written, and a file that
differs is an error.
"""

from __future__ import annotations

import json
import math
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

from pretrain.monitor.figures import Figure

ROOT = Path(__file__).resolve().parents[1]
_REFERENCE = re.compile(r"\{([^{}/]+)/([^{}/]+)/([^{}/]+?)(%?)\}")  # file/model/figure
_SEED = re.compile(r"-seed[0-9]+$")
_FIELDS = ("tokens", "cpu_seconds")  # of a row, shown like figures


def shown(figures: Sequence[Figure], *, percent: bool = False) -> str:
    """Return the mean of several seeds with their range, or a value with its interval."""
    values = [figure.value for figure in figures]
    first, factor, unit = mean(values), 100 if percent else 1, " %" if percent else ""
    if percent:
        digits = 1
    elif first >= 100 or first == int(first):  # a count
        digits = 0
    else:
        digits = 3 if first < 3 else 1

    def number(value: float) -> str:
        return f"{value * factor:,.{digits}f}"

    text = number(first) + unit
    if len(figures) > 1:
        return f"{text} ({number(min(values))} to {number(max(values))})"
    margin = figures[0].margin
    return text if margin is None else f"{text} ±{number(margin)}"


class Records:
    """Hold all records, and look figures up in them.

    A later record replaces an earlier one of the same model, seed and figure.
    """

    def __init__(self, folder: Path) -> None:
        self.of_file: dict[str, list[dict[str, Any]]] = {
            file.stem: json.loads(file.read_bytes()) for file in sorted(folder.glob("*.json"))
        }

    def models(self, file: str) -> dict[str, dict[str, list[Figure]]]:
        """Return the figures of each model, one for each seed, in order and without checkpoints.

        Raises:
            ValueError: two models were measured on different data.
        """
        last: dict[tuple[str, Any], dict[str, Any]] = {}
        data: dict[str, Any] = {}
        for record in self.of_file[file]:
            for row in record["rows"]:
                key = _SEED.sub("", row.get("run", row["model"])), row.get("seed")
                if row.get("checkpoint"):
                    continue
                before = last.get(key, {"figures": {}})
                last[key] = {**before, **row, "figures": {**before["figures"], **row["figures"]}}
                for name in row["figures"] if file != "corpora" else ():
                    if data.setdefault(name, record["data"]) != record["data"]:
                        raise ValueError(f"{file}.json: {name} was measured on different data")
        found: dict[str, dict[str, list[Figure]]] = {}
        for (name, _), row in last.items():
            fields = {key: {"value": row[key]} for key in _FIELDS if key in row}
            for figure, values in {**row["figures"], **fields}.items():
                found.setdefault(name, {}).setdefault(figure, []).append(Figure(**values))
        return found

    def fill(self, text: str) -> str:
        """Replace each {file/model/figure} by its value.

        Raises:
            ValueError: no record has it.
        """

        def value(found: re.Match[str]) -> str:
            file, model, figure, percent = found.groups()
            try:
                return shown(self.models(file)[model][figure], percent=bool(percent))
            except KeyError:
                raise ValueError(f"no record in docs/results has {found[0]}") from None

        return _REFERENCE.sub(value, text)

    def curve(self, file: str, model: str, figure: str) -> list[tuple[float, float]]:
        """Return (tokens, value) of every checkpoint of a run that was measured."""
        rows = [row for record in self.of_file[file] for row in record["rows"]]
        points = {
            row["tokens"]: row["figures"][figure]["value"]
            for row in rows
            if row.get("run", row["model"]) == model
        }
        return sorted(points.items())


def page(records: Records, sections: Sequence[Mapping[str, Any]], plot: str) -> str:
    """Return docs/results.md; `plot` is the file whose section shows the plot."""
    parts = ["# Results", "", "Written by `make results` from the records in `docs/results`.", ""]
    for section in sections:
        file, labels = section["file"], section["labels"]
        parts += [f"## {section['title']}", "", records.fill(section["text"]), ""]
        if file not in records.of_file:
            parts += ["Not measured.", ""]
            continue
        if file == plot:
            parts += [f"![The plot of the table](results/{plot}.svg)", ""]
        found = records.models(file)
        names = dict.fromkeys([*(name for name in labels if name in found), *found])
        columns = list(dict.fromkeys(figure for name in names for figure in found[name]))
        heads = [column.replace("_", " ").replace("cpu", "CPU") for column in columns]
        rows = [["", *heads], ["---"] * (len(heads) + 1)]
        for name in names:
            cells = [shown(found[name][c]) if c in found[name] else "" for c in columns]
            rows.append([labels.get(name, name), *cells])
        parts += ["| " + " | ".join(cells) + " |" for cells in rows]
        parts += ["", "Measured by:", ""]
        for record in records.of_file[file]:
            hardware = record["hardware"]
            cpu = f"{hardware['processor']}, {hardware['threads']} thread(s)"
            made = f"{record['date']}, commit {record['commit']}, {hardware.get('gpu', cpu)}"
            parts.append(f"- {made}: `{record['command']}`")
        parts.append("")
    return "\n".join(parts)


def ticks(low: float, high: float) -> list[float]:
    """Return three to eight round numbers from low to high."""
    exponent = math.floor(math.log10(high - low)) - 1
    step = next(s * 10**exponent for s in (2, 5, 10, 20, 50) if (high - low) / s / 10**exponent < 8)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def svg(records: Records, plot: Mapping[str, Any]) -> str:
    """Return the plot: curves over tokens, and horizontal lines for models with one value."""
    file, figure = plot["file"], plot["figure"]
    width, height, left, right, top, bottom = 760, 340, 56, 190, 36, 46
    found = records.models(file)

    def value_of(model: str) -> float:
        return mean(measured.value for measured in found[model][figure])

    # A run begins where its layers were before training.
    start = (0.0, value_of(plot["start"]))
    curves = {
        text: [start, *records.curve(file, name, figure)] for name, text in plot["curves"].items()
    }
    lines = {text: value_of(name) for name, text in plot["lines"].items()}
    values = [y for points in curves.values() for _, y in points] + [*lines.values()]
    most = max(x for points in curves.values() for x, _ in points)
    low, high = min(values) - 0.02, max(values) + 0.02
    end = width - right

    def x_of(tokens: float) -> float:
        return left + (end - left) * tokens / most

    def y_of(value: float) -> float:
        return top + (height - top - bottom) * (high - value) / (high - low)

    def text(x: float, y: float, content: str, more: str = "") -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{content}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        text(left, 20, plot["title"], 'font-weight="bold"'),
        text((left + end) / 2, height - 6, plot["x_label"], 'text-anchor="middle"'),
    ]
    for value in ticks(low, high):
        y = y_of(value)
        parts.append(f'<path d="M{left} {y:.1f}H{end}" stroke="#dddddd"/>')
        parts.append(text(left - 8, y + 4, f"{value:.2f}", 'text-anchor="end"'))
    for tokens in ticks(0, most):
        label = f"{tokens / 1000:,.0f}k"
        parts.append(text(x_of(tokens), height - 24, label, 'text-anchor="middle"'))
    labels = []
    for name, value in lines.items():
        y = y_of(value)
        parts.append(f'<path d="M{left} {y:.1f}H{end}" stroke="#888888" stroke-dasharray="5 4"/>')
        labels.append((y, "#555555", name))
    for name, points in curves.items():
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="#0b62a4" stroke-width="3"/>')
        labels.append((y_of(points[-1][1]), "#0b62a4", name))
    lowest = 0.0
    for y, colour, name in sorted(labels):
        lowest = max(y, lowest + 16)  # labels that would overlap move down
        parts.append(text(end + 8, lowest + 4, name, f'fill="{colour}"'))
    return "\n".join([*parts, "</svg>", ""])


def readme(records: Records, blocks: Mapping[str, str], text: str) -> str:
    """Return README.md with its blocks filled in."""
    for name, block in blocks.items():
        begin, end = f"<!-- {name} -->\n", "<!-- end -->"
        before, found, rest = text.partition(begin)
        if not found or end not in rest:
            raise ValueError(f"README.md has no block {begin.strip()} ... {end}")
        text = before + begin + records.fill(block) + end + rest.partition(end)[2]
    return text


def header(records: Records, template: str, text: str) -> str:
    """Return a config with the lines `# Measured: ...`, which end its header."""
    lines = text.splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    begin = next((i for i in range(end) if lines[i].startswith("# Measured:")), end)
    filled = textwrap.wrap(f"Measured: {records.fill(template)}", 96)
    return "\n".join([*lines[:begin], *(f"# {line}" for line in filled), *lines[end:], ""])


def outputs(root: Path, records: Records) -> Iterator[tuple[Path, str]]:
    """Yield each file that holds results, and what it should hold."""
    texts = yaml.safe_load((root / "docs" / "results" / "texts.yaml").read_text(encoding="utf-8"))
    plot = texts["plot"]
    yield root / "docs" / "results.md", page(records, texts["sections"], plot["file"])
    yield root / "docs" / "results" / f"{plot['file']}.svg", svg(records, plot)
    file = root / "README.md"
    yield file, readme(records, texts["blocks"], file.read_text(encoding="utf-8"))
    for name, template in texts["headers"].items():
        file = root / "configs" / f"{name}.yaml"
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
