"""Compare record files with figures computed another way, and with what the screen shows."""

import json
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import binomtest
from support.runs import RECIPE, start

from pretrain.evaluation.heads import evaluate_heads
from pretrain.monitor.figures import Figure, share


def test_a_run_and_its_start_are_recorded_beside_teacher_and_guessing(
    tmp_path: Path, teacher_folder: Path, corpus: Path, run_config: Any, distil: Any
) -> None:
    values = run_config(tmp_path / "runs" / "student", teacher_folder, **RECIPE)
    values["train"]["seed"] = 3
    start(values)
    run, file = Path(values["output"]), tmp_path / "results" / "tiny.json"
    command = ("evaluate", run, corpus, "--rows", 4, "--teacher", teacher_folder)
    for _ in range(2):
        code, out, error = distil(*command, "--record", file)
        assert code == 0, error
    first, second = json.loads(file.read_bytes())
    assert first == second and "--record" not in first["command"]
    assert first["command"].startswith("distil evaluate ") and len(first["data"]) == 64
    rows = {row["model"]: row for row in first["rows"]}
    assert list(rows) == ["teacher", "student", "the same layers, untrained", "guessing"]
    known = evaluate_heads([str(run)], corpus, rows=4, teacher=str(teacher_folder), warn=print)
    student = rows["student"]["figures"]
    for name, figure in known[str(run)].items():
        assert student[name] == pytest.approx(figure._asdict(), abs=1e-5), name
    assert rows["teacher"]["figures"]["loss"]["value"] == pytest.approx(
        known[str(teacher_folder)]["loss"].value, abs=1e-5
    )
    # The start is what training itself measured before its first step.
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    begun = next(e for e in entries if e["kind"] == "evaluation" and e["step"] == 0)
    untrained = rows["the same layers, untrained"]["figures"]
    assert untrained["loss"]["value"] == pytest.approx(begun["loss"], abs=1e-3)
    trained = [e for e in entries if e["kind"] == "train"]
    assert rows["student"]["seed"] == 3 and rows["student"]["tokens"] == trained[-1]["tokens"]
    assert rows["student"]["cpu_seconds"] == pytest.approx(
        sum(e["cpu_seconds"] for e in trained), abs=0.06
    )
    assert str(Figure(**student["accuracy"])) in out


def test_a_record_file_that_cannot_be_written_is_refused_before_measuring(
    tmp_path: Path, distil: Any
) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "results.json", tmp_path):
        code, _, error = distil("bench", "--record", place)
        assert code == 2 and f"--record {place}" in error


@pytest.mark.parametrize("content", ["{}", "no json"])
def test_a_record_file_of_another_kind_is_refused_before_measuring(
    content: str, tmp_path: Path, distil: Any
) -> None:
    file = tmp_path / "notes.json"
    file.write_text(content)
    commands: tuple[tuple[object, ...], ...] = (
        ("bench", "--record", file),
        ("demo", "--record", file),
    )
    for command in commands:
        code, _, error = distil(*command)
        assert code == 2 and f"--record {file}" in error
        assert len(error.strip().splitlines()) == 1
    assert file.read_text() == content


def test_a_share_of_nothing_and_of_all_has_no_impossible_interval() -> None:
    for right, count in ((10, 10), (0, 10), (80, 400), (39, 40)):
        wilson = binomtest(right, count).proportion_ci(0.95, "wilson")
        found = share(right / count, count)
        assert found == pytest.approx((right / count, wilson.low, wilson.high), abs=1e-4)
        assert 0 <= found[1] <= found[0] <= found[2] <= 1
    low, high = share(0.5, 0)[1:]
    assert low < 0.12 and high > 0.88


@pytest.mark.slow
def test_a_corpus_records_the_counts_of_its_manifest(tmp_path: Path, distil: Any) -> None:
    (tmp_path / "a.txt").write_text("\n".join(f"word {i}" for i in range(40)), encoding="utf-8")
    corpus = (
        f"output: {tmp_path}/mine\ntokenizer: {{train: {{vocab_size: 100}}}}\nrow_length: 16\n"
        f"sources: [{{kind: text, path: {tmp_path}/a.txt, document: line}}]\nvalidation: 0.2\n"
    )
    (tmp_path / "corpus.yaml").write_text(corpus, encoding="utf-8")
    file = tmp_path / "record.json"
    code, _, error = distil("prepare", tmp_path / "corpus.yaml", "--record", file)
    assert code == 0, error
    (record,) = json.loads(file.read_bytes())
    manifest = json.loads((tmp_path / "mine" / "manifest.json").read_bytes())
    figures = {name: value["value"] for name, value in record["rows"][0]["figures"].items()}
    splits = manifest["splits"].values()
    assert record["data"] == manifest["digest"] and figures["documents"] == 40
    assert figures["tokens"] == sum(split["tokens"] for split in splits)
    assert figures["rows"] == sum(split["rows"] for split in splits)
