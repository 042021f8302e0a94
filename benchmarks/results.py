"""Write what was measured, from the records in docs/results, where people read it.

    python benchmarks/results.py [--check]      (`make results`)

The records are appended by `--record` of `distil evaluate`, `demo`, `bench` and `prepare`, and of
benchmarks/peers.py; docs/results/texts.yaml says where their figures stand: in the rows of
docs/results.md and the page of each record beside it, in the blocks of README.md and
docs/choosing.md between `<!-- NAME -->` and `<!-- end -->`, in the lines `# Measured:` that end
the headers of configs, and in the blocks `<!-- measured CONFIG -->` of the papers' pages. With
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
from typing import Any

import yaml

from pretrain.monitor.figures import Figure
from pretrain.monitor.plot import line_plot

ROOT = Path(__file__).resolve().parents[1]
# {file/model/figure}, as a percentage (%), the share of errors (:errors) or minutes (:minutes)
_REFERENCE = re.compile(r"\{([^{}/]+)/([^{}]+)/([^{}/]+?)(%|:errors|:minutes)?\}")
_SEED = re.compile(r"-seed[0-9]+")
_DEVICES, _OTHERS = "{checked devices}", ("H100", "A100", "V100")
_FIELDS = ("tokens", "cpu_seconds")  # of a row, shown like figures

_COARSE = ("MB", "ms", "M parameters")  # figures of one digit after the point


def shown(figures: Sequence[Figure], *, percent: bool = False, coarse: bool = False) -> str:
    """Return the mean of several seeds with their range, or a value with its interval."""
    values = [figure.value for figure in figures]
    first, factor, unit = mean(values), 100 if percent else 1, " %" if percent else ""
    if percent or coarse:
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
            file, model, figure, unit = found.groups()
            try:
                figures = self.models(file)[model][figure]
            except KeyError:
                raise ValueError(f"no record in docs/results has {found[0]}") from None
            if unit == ":minutes":
                return shown([Figure(mean(figure.value for figure in figures) / 60)], coarse=True)
            if unit == ":errors":
                figures = [_errors(figure) for figure in figures]
            return shown(figures, percent=unit in ("%", ":errors"), coarse=figure in _COARSE)

        return _REFERENCE.sub(value, text.replace(_DEVICES, self.devices()))

    def devices(self) -> str:
        """Return the table of devices that were checked, the last record of each, and of others."""
        found = self.of_file.get("self-check", [])
        last = {record["hardware"].get("gpu", "CPU"): record for record in found}
        lines = ["| device | `distil bench --self-check` |", "|---|---|"]
        same: dict[str, list[str]] = {}
        for name, record in last.items():
            right = [
                row["figures"]["ok"]["value"] for row in record["rows"] if "ok" in row["figures"]
            ]
            same.setdefault(f"{sum(right):.0f} of {len(right)} right", []).append(name)
        lines += [f"| {', '.join(names)} | {result} |" for result, names in same.items()]
        missing = [name for name in _OTHERS if not any(name in known for known in last)]
        return "\n".join(lines + [f"| {', '.join(missing)} | not run |"] * bool(missing))

    def curve(self, file: str, model: str, figure: str) -> list[tuple[float, float]]:
        """Return (tokens, value) of every checkpoint of a run that was measured."""
        rows = [row for record in self.of_file[file] for row in record["rows"]]
        points = {
            row["tokens"]: row["figures"][figure]["value"]
            for row in rows
            if row.get("run", row["model"]) == model
        }
        return sorted(points.items())


def _errors(figure: Figure) -> Figure:
    """Return the share that is wrong, from the share that is right."""
    low, high = (None if end is None else 1 - end for end in (figure.high, figure.low))
    return Figure(1 - figure.value, low, high)


def summary(records: Records, texts: Mapping[str, Any]) -> str:
    """Return docs/results.md: the rows that people ask for, and links to all pages."""
    titles = {section["file"]: section["title"] for section in texts["sections"]}
    columns = [*texts["columns"], "processor", "command"]
    parts = ["# Results", "", *texts["summary"].splitlines(), ""]
    parts += [_line(["", *columns]), _line(["---"] * (len(columns) + 1))]
    for row in texts["rows"]:
        file = row["page"]
        cells = [f"[{row['what']}](results/{file}.md)"]
        cells += [records.fill(row.get(column, "")) for column in texts["columns"]]
        machines = (record["hardware"] for record in records.of_file[file])
        names = dict.fromkeys(each.get("gpu", each["processor"]) for each in machines)
        processor = " and ".join(names)
        parts.append(_line([*cells, f"{processor}, {row['precision']}", f"`{row['command']}`"]))
    others = [file for file in titles if file not in {row["page"] for row in texts["rows"]}]
    parts += ["", "All other pages:", "", *(f"- [{titles[f]}](results/{f}.md)" for f in others), ""]
    return "\n".join(parts)


def page(records: Records, section: Mapping[str, Any], plot: str) -> str:
    """Return docs/results/FILE.md; `plot` is the file whose page shows the plot."""
    file, labels = section["file"], section["labels"]
    parts = [f"# {section['title']}", "", records.fill(section["text"]), ""]
    if file == plot:
        parts += [f"![The plot of the table]({plot}.svg)", ""]
    if _DEVICES not in section["text"]:
        found = records.models(file)
        names = dict.fromkeys([*(name for name in labels if name in found), *found])
        columns = list(dict.fromkeys(figure for name in names for figure in found[name]))
        heads = [column.replace("_", " ").replace("cpu", "CPU") for column in columns]
        parts += [_line(["", *heads]), _line(["---"] * (len(heads) + 1))]
        for name in names:
            cells = [shown(found[name][c]) if c in found[name] else "" for c in columns]
            parts.append(_line([labels.get(name, name), *cells]))
        parts.append("")
    return "\n".join([*parts, *measured_by(records, file)])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def measured_by(records: Records, file: str) -> list[str]:
    """Return the lines that name the command of each record."""
    lines = ["Measured by:", ""]
    for record in records.of_file[file]:
        made = f"{record['date']}, commit {record['commit']}, {device(record)}"
        lines.append(f"- {made}: `{record['command']}`")
    return [*dict.fromkeys(lines), ""]  # one command may have appended several records


def device(record: Mapping[str, Any]) -> str:
    """Return the GPU of a record, or the processor and its threads."""
    hardware = record["hardware"]
    cpu = f"{hardware['processor']}, {hardware['threads']} thread(s)"
    return str(hardware.get("gpu", cpu))


def svg(records: Records, plot: Mapping[str, Any]) -> str:
    """Return the plot of a file's records: curves over tokens, and a line for each other model."""
    file, figure = plot["file"], plot["figure"]
    found = records.models(file)

    def value_of(model: str) -> float:
        return mean(measured.value for measured in found[model][figure])

    # A run begins where its layers were before training.
    start = (0.0, value_of(plot["start"]))
    return line_plot(
        plot["title"],
        plot["x_label"],
        {text: [start, *records.curve(file, run, figure)] for run, text in plot["curves"].items()},
        {text: value_of(name) for name, text in plot["lines"].items()},
    )


def readme(records: Records, blocks: Mapping[str, str], text: str) -> str:
    """Return README.md, or another page, with its blocks filled in."""
    for name, block in blocks.items():
        begin, end = f"<!-- {name} -->\n", "<!-- end -->"
        before, found, rest = text.partition(begin)
        if not found or end not in rest:
            raise ValueError(f"the page has no block {begin.strip()} ... {end}")
        text = before + begin + records.fill(block) + end + rest.partition(end)[2]
    return text


def header(records: Records, template: str, text: str) -> str:
    """Return a config with the lines `# Measured: ...`, which end its header."""
    lines = text.splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    begin = next((i for i in range(end) if lines[i].startswith("# Measured:")), end)
    filled = textwrap.wrap(f"Measured: {records.fill(template)}", 96)
    return "\n".join([*lines[:begin], *(f"# {line}" for line in filled), *lines[end:], ""])


def paper(records: Records, headers: Mapping[str, str], text: str) -> str:
    """Return the page of a paper with what its configs measured."""

    def block(found: re.Match[str]) -> str:
        filled = records.fill(headers.get(found[2], "Not measured."))
        lines = textwrap.wrap(filled[0].upper() + filled[1:], 118)
        return "\n".join([found[1], *lines, found[3]])

    blocks = r"(<!-- measured ([\w-]+) -->)\n.*?(<!-- end -->)"
    return re.sub(blocks, block, text, flags=re.DOTALL)


def outputs(root: Path, records: Records) -> Iterator[tuple[Path, str]]:
    """Yield each file that holds results, and what it should hold."""
    texts = yaml.safe_load((root / "docs" / "results" / "texts.yaml").read_text(encoding="utf-8"))
    plot = texts["plot"]
    yield root / "docs" / "results.md", summary(records, texts)
    for section in texts["sections"]:
        file = root / "docs" / "results" / f"{section['file']}.md"
        yield file, page(records, section, plot["file"])
    yield root / "docs" / "results" / f"{plot['file']}.svg", svg(records, plot)
    for name, blocks in (("README.md", "blocks"), ("docs/choosing.md", "choosing")):
        file = root / name
        yield file, readme(records, texts[blocks], file.read_text(encoding="utf-8"))
    for name, template in texts["headers"].items():
        file = root / "configs" / f"{name}.yaml"
        yield file, header(records, template, file.read_text(encoding="utf-8"))
    for file in sorted((root / "docs" / "papers").glob("*.md")):
        yield file, paper(records, texts["headers"], file.read_text(encoding="utf-8"))


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
