"""Compare every published figure with its record, and the renderer with hand-made records."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.results import Records, header, outputs, page, paper, readme, summary

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
# A number with a unit of quality, time, size or speed; and a decimal number, as qualities are.
UNIT = re.compile(
    r"\d[\d.,]*(x\b| ?(%|seconds|minutes|hours|s\b|ms|MB|GFLOP|tokens/s|points|times|Pearson))"
)
FIGURE = re.compile(rf"\d+\.\d+|{UNIT.pattern}")
VERSIONS = re.compile(r"Python 3\.10 to 3\.13|Apache-2\.0")


def record(rows: list[dict[str, Any]], data: str | None = "d" * 64) -> dict[str, Any]:
    hardware = {"processor": "a CPU", "threads": 1, "device": "cpu"}
    return {
        "command": "distil evaluate x",
        "date": "2026-01-02",
        "commit": "abc",
        "data": data,
        "hardware": hardware,
        "rows": rows,
    }


def test_every_file_holds_what_the_records_say() -> None:
    written = set()
    for file, text in outputs(ROOT, Records(RESULTS)):
        written.add(file)
        assert file.read_text(encoding="utf-8") == text, f"{file}: run make results"
    assert not set(RESULTS.glob("*.md")) - written
    assert {file.with_suffix(".md") for file in RESULTS.glob("*.json")} <= written


def test_a_figure_that_no_record_has_or_that_was_edited_is_found(tmp_path: Path) -> None:
    for name in ("docs", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "README.md", tmp_path)
    file = tmp_path / "docs" / "results" / "demo.json"
    known = json.loads(file.read_bytes())
    row = next(row for row in known[0]["rows"] if row["model"] == "student")
    row["figures"]["accuracy"]["value"] = 0.9123
    file.write_text(json.dumps(known))
    changed = {
        str(path.relative_to(tmp_path))
        for path, text in outputs(tmp_path, Records(file.parent))
        if path.read_text(encoding="utf-8") != text
    }
    pages = {"docs/results.md", "docs/results/demo.md", "README.md", "configs/demo.yaml"}
    assert changed >= pages
    file.unlink()
    with pytest.raises(ValueError, match=r"no record in docs/results has \{demo/"):
        list(outputs(tmp_path, Records(file.parent)))


def test_the_readme_has_no_figure_outside_its_blocks_and_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    words = re.sub(
        r"```.*?```|<!--.*?-->|^\|.*?$|\]\(.*?\)", "", text, flags=re.DOTALL | re.MULTILINE
    )
    assert len(words.split()) <= 500
    prose = re.sub(r"<!-- \w+ -->\n.*?<!-- end -->|```.*?```", "", text, flags=re.DOTALL)
    assert not [found[0] for found in FIGURE.finditer(VERSIONS.sub("", prose))]


def test_texts_take_their_figures_from_records() -> None:
    texts = yaml.safe_load((RESULTS / "texts.yaml").read_text(encoding="utf-8"))
    sections = [section["text"] for section in texts["sections"]]
    rows = [row[column] for row in texts["rows"] for column in texts["columns"] if column in row]
    for text in (*texts["blocks"].values(), *texts["headers"].values(), *sections, *rows):
        words = re.sub(r"\{[^{}]+\}|\(\S+\)|95 % interval", "", text)
        assert not [found[0] for found in FIGURE.finditer(words)]


def test_configs_have_measured_figures_only_in_lines_from_records() -> None:
    """Leave out what a paper's authors report, and what is called estimated."""
    texts = yaml.safe_load((RESULTS / "texts.yaml").read_text(encoding="utf-8"))
    for file in sorted((ROOT / "configs").glob("*.yaml")):
        lines = file.read_text(encoding="utf-8").splitlines()
        end = next(i for i, line in enumerate(lines) if not line.startswith("#"))
        begin = next((i for i in range(end) if lines[i].startswith("# Measured:")), end)
        assert (begin < end) == (file.stem in texts["headers"]), file
        comments = [line.partition("#")[2] for line in (*lines[:begin], *lines[end:])]
        written = " ".join(" ".join(comments).split())
        written = re.sub(r"authors report.*?(?=;|$)|Time, estimated: .*?\.", "", written)
        assert not [found[0] for found in UNIT.finditer(written)], file


def test_tables_of_students_have_the_rows_to_compare_them_with() -> None:
    records = Records(RESULTS)
    untrained = "the same layers, untrained"
    for file, names in {
        "sentences": {"minilm-l6-body", "3x384", untrained, "alone-3x384", "model2vec"},
        "demo": {"demo-teacher", "student", untrained, "alone", "model_quantized.onnx"},
    }.items():
        assert names <= set(records.models(file)), file
    for file, found in records.of_file.items():
        for entry in found:
            assert set(entry) >= {"command", "commit", "data", "date", "hardware", "rows"}, file
            assert not re.search(r"(?<![\w.])/(work|home|root|tmp|opt)/", json.dumps(entry)), file
            assert entry["commit"] and not entry["commit"].endswith("+"), file


def test_seeds_are_averaged_and_later_records_win(tmp_path: Path) -> None:
    def row(model: str, value: float, **more: Any) -> dict[str, Any]:
        pearson = {"value": value, "low": value - 0.1, "high": value + 0.1}
        return {"model": model, "figures": {"pearson": pearson}, **more}

    found = [
        record([row("teacher", 0.9), row("a-seed0", 0.1, seed=0, tokens=90)]),
        record([row("a-seed0", 0.5, seed=0, tokens=100)]),
        record([row("step-7", 0.3, run="a-seed0", seed=0, tokens=70, checkpoint=True)]),
        record([row("a-seed1", 0.7, seed=1, tokens=104)]),
    ]
    (tmp_path / "x.json").write_text(json.dumps(found))
    records = Records(tmp_path)
    assert records.fill("{x/a/pearson}; {x/teacher/pearson}; {x/teacher/pearson%}") == (
        "0.600 (0.500 to 0.700); 0.900 ±0.100; 90.0 % ±10.0"
    )
    assert records.fill("{x/a/tokens}") == "102 (100 to 104)"
    assert records.curve("x", "a-seed0", "pearson") == [(70, 0.3), (90, 0.1), (100, 0.5)]
    section = {"file": "x", "title": "T", "text": "{x/teacher/pearson}", "labels": {"a": "A"}}
    lines = page(records, section, "").splitlines()
    assert "| A | 0.600 (0.500 to 0.700) | 102 (100 to 104) |" in lines
    assert lines.index("| A | 0.600 (0.500 to 0.700) | 102 (100 to 104) |") < lines.index(
        "| teacher | 0.900 ±0.100 |  |"
    )
    assert lines[0] == "# T" and "2026-01-02, commit abc, a CPU, 1 thread(s)" in lines[-1]
    claim = {"what": "W", "page": "x", "precision": "bf16", "command": "distil x"}
    claim |= {"score": "{x/teacher/pearson:errors}", "minutes": "{x/a/tokens:minutes}"}
    texts = {"sections": [section, {**section, "file": "y", "title": "Y"}], "rows": [claim]}
    texts |= {"summary": "S", "columns": ["score", "minutes", "control"]}
    lines = summary(records, texts).splitlines()
    assert "| [W](results/x.md) | 10.0 % ±10.0 | 1.7 |  | a CPU, bf16 | `distil x` |" in lines
    assert lines[-1] == "- [Y](results/y.md)"
    assert header(records, "{x/teacher/pearson}", "# Title.\n#\n# Measured: old\n# x\na: 1\n") == (
        "# Title.\n#\n# Measured: 0.900 ±0.100\na: 1\n"
    )
    filled = readme(records, {"b": "{x/teacher/pearson}\n"}, "1\n<!-- b -->\nold\n<!-- end -->\n2")
    assert filled == "1\n<!-- b -->\n0.900 ±0.100\n<!-- end -->\n2"
    text = "a\n<!-- measured b -->\nold\n<!-- end -->\n<!-- measured c -->\n<!-- end -->\n"
    assert paper(records, {"b": "pearson {x/teacher/pearson}"}, text) == (
        "a\n<!-- measured b -->\nPearson 0.900 ±0.100\n<!-- end -->\n"
        "<!-- measured c -->\nNot measured.\n<!-- end -->\n"
    )
    with pytest.raises(ValueError, match="no block <!-- c -->"):
        readme(records, {"c": ""}, "text")
    (tmp_path / "x.json").write_text(json.dumps([*found, record([row("b", 1)], "e" * 64)]))
    with pytest.raises(ValueError, match="measured on different data"):
        Records(tmp_path).fill("{x/a/pearson}")
