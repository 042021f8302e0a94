"""Rehearse the comparison of a whole run with the plain loop, on a CPU with tiny models."""

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from processes import ROOT, finished

from benchmarks.full_width import LOOPS, entries, report
from data_prep.config import CorpusConfig
from data_prep.prepare import prepare

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(40))]


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Return rows of 16 tokens, as many as several steps of 128 need."""
    draw = Random(0)
    lines = [" ".join(draw.choices(WORDS[5:], k=draw.randint(4, 30))) for _ in range(300)]
    (tmp_path / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    source = {"kind": "text", "path": str(tmp_path / "text.txt"), "document": "line"}
    values = {"output": tmp_path / "shards", "tokenizer": str(tmp_path / "vocab.txt")}
    values |= {"sources": [source], "row_length": 16, "validation": 0.1, "workers": 1}
    prepare(CorpusConfig.model_validate(values))
    return tmp_path / "shards"


@pytest.mark.slow
def test_two_halves_resume_both_loops(tmp_path: Path, shards: Path) -> None:
    folder = tmp_path / "runs"

    def run(stage: str, *more: object) -> subprocess.CompletedProcess[str]:
        command = [ROOT / "benchmarks" / "on_gpu.sh", "--distil", stage, shards, folder]
        done = finished(
            *command,
            *("--rehearse", "--minutes", "0.05", *more),
            environment={"PYTHON": sys.executable, "OUT": str(tmp_path)},
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        return done

    run("teacher")
    run("half")
    first = {name: entries(folder / name)[-1]["step"] for name in LOOPS}
    table = run("half").stdout
    for name in LOOPS:
        found = entries(folder / name)
        assert found[-1]["step"] > first[name]
        steps = [entry["step"] for entry in found if entry["kind"] == "train"]
        assert steps == list(range(1, len(steps) + 1))  # nothing is left out or repeated
        assert name in table
    # The same weights, rows and masks: before training the figures are equal.
    ours, plain = (entries(folder / name)[0] for name in LOOPS)
    assert ours.pop("kind") == plain.pop("kind") and ours["step"] == 0
    assert ours == pytest.approx(plain, rel=1e-5)
    tokens = [
        {e["step"]: e["tokens"] for e in entries(folder / name) if e["kind"] == "train"}
        for name in LOOPS
    ]
    assert all(tokens[0][step] == tokens[1][step] for step in tokens[0].keys() & tokens[1].keys())
    assert run("report").stdout == table == (tmp_path / "full-width-half.txt").read_text()

    lines = [f"a\tb\tc\td\t{i}\t{' '.join(WORDS[5 : 7 + i])}\tw9 w8 w7" for i in range(6)]
    (tmp_path / "pairs.csv").write_text("\n".join(lines), encoding="utf-8")
    shown = run("embedding", "--teacher", folder / "teacher", "--pairs", tmp_path / "pairs.csv")
    assert shown.stdout.count("Pearson on STS-B") >= 2 and "\nembedding " in shown.stdout


def test_the_report_has_tokens_quality_speed_and_memory(tmp_path: Path) -> None:
    figures = {"loss": 2.5, "accuracy": 0.5, "agreement": 0.75}
    lines = [
        {"kind": "evaluation", "step": 0, **figures},
        {"kind": "train", "step": 20, "tokens": 4000, "tokens_per_second": 100.0},
        {"kind": "train", "step": 40, "tokens": 8000, "tokens_per_second": 300.0},
        {"kind": "evaluation", "step": 40, **figures},
    ]
    (tmp_path / "ours").mkdir()
    text = "\n".join(map(json.dumps, lines)) + '\n{"kind": "tr'  # a line that is being written
    (tmp_path / "ours" / "metrics.jsonl").write_text(text, encoding="utf-8")
    memory = [{"loop": "ours", "peak_gb": peak} for peak in (3.0, 5.0, 4.0)]
    (tmp_path / "memory.jsonl").write_text("\n".join(map(json.dumps, memory)), encoding="utf-8")
    _, start, end, speed = report(tmp_path).splitlines()
    assert start.split() == ["ours", "0", "2.500", "50.00%", "75.00%"]
    assert end.split()[:2] == ["ours", "8,000"]
    assert speed.split() == ["ours", "8,000", "200", "tokens/s,", "5.0", "GB"]
