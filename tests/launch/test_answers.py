"""Check the answers of `distil inspect --row` and `distil replay`, as text and as JSON."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.processes import assert_refused
from support.small_corpora import PAIRS, SPECIAL, three_texts

from data_prep.config import CorpusConfig
from data_prep.messages import one_line
from data_prep.prepare import prepare
from data_prep.shards import load_manifest

Distil = Callable[..., Any]
TITLES = ["[red]One[/red]", "Two \x1b[31mred\x1b[0m", "Three"]


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Prepare three documents whose titles look like markup."""
    fields = [{"id": f"id{n}", "title": title} for n, title in enumerate(TITLES)]
    source = {"path": str(tmp_path / "texts.jsonl"), "licence": "CC0-1.0"}
    prepare(CorpusConfig.model_validate(three_texts(tmp_path, fields, source)))
    return tmp_path / "shards"


@pytest.fixture
def run(tmp_path: Path, shards: Path, seal: Any) -> Path:
    """Write a run with a checkpoint of its first step."""
    train = {"max_steps": 5, "global_batch_size": 4, "precision": "fp32", "micro_batch_size": 1}
    run = tmp_path / "run"
    values = {"output": str(run), "shards": str(shards), "teacher": "nobody", "train": train}
    digest = load_manifest(shards).digest
    seal(run, {"step": 1, "config": values, "shards": digest, "num_processes": 1})
    return run


def test_a_row_shows_titles_and_licences(distil: Distil, shards: Path) -> None:
    for row in range(3):
        code, out, _ = distil("inspect", shards, "--row", row)
        assert code == 0 and "CC0-1.0" in out
        code, lines, _ = distil("inspect", shards, "--row", row, "--json")
        (entry,) = map(json.loads, lines.splitlines())
        assert entry["row"] == row and entry["title"] == TITLES[int(entry["document"][2:])]
        assert entry["document"] in out and one_line(entry["title"]) in out
        assert "\x1b" not in out


def test_a_wrong_option_of_inspect_or_replay_is_one_line_and_exit_code_2(
    distil: Distil, shards: Path, run: Path
) -> None:
    for arguments, part in (
        (("inspect", shards, "--row", 99), "rows 0 to 2"),
        (("inspect", shards, "--row", 0, "--split", "validation"), "no validation split"),
        (("replay", run, "--step", 6), "steps 1 to 5"),
        (("replay", run, "--step", 1, "--world-size", 3), "world size 3 does not divide"),
        (("replay", shards, "--step", 1), "no checkpoint"),
    ):
        assert_refused(distil(*arguments), part)


def test_replay_shows_rows_and_masks(distil: Distil, run: Path) -> None:
    code, lines, _ = distil("replay", run, "--step", 2, "--world-size", 2, "--json")
    rows = [json.loads(line) for line in lines.splitlines()]
    assert code == 0 and [row["position"] for row in rows] == [0, 1, 2, 3]
    assert [(row["rank"], row["micro_batch"]) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    code, out, error = distil("replay", run, "--step", 2, "--world-size", 2, "--rows", 3)
    assert code == 0 and "its newest checkpoint is of step 1" in error
    header, *shown = [line.split() for line in out.splitlines()[1:5]]
    assert header == ["position", "rank", "micro-batch", "epoch", "row", "masked", "masks"]
    for row, fields in zip(rows, shown, strict=False):
        wanted = ("position", "rank", "micro_batch", "epoch", "row")
        assert fields[:6] == [*(str(row[name]) for name in wanted), str(len(row["masks"]))]
        mask = row["masks"][0]
        tokens = [*SPECIAL, *PAIRS]
        more = "," if len(row["masks"]) > 1 else ""
        assert fields[6:9] == [tokens[mask["label"]], "->", tokens[mask["shown"]] + more]
    assert "3 of 4 rows" in out
    code, lines, _ = distil("replay", run, "--step", 2, "--world-size", 2, "--rank", 1, "--json")
    assert [json.loads(line) for line in lines.splitlines()] == rows[2:]


def test_replay_marks_skipped_rows(distil: Distil, run: Path) -> None:
    _, plain, _ = distil("replay", run, "--step", 2, "--json")
    left_out = json.loads(plain.splitlines()[1])["row"]
    entry = {"kind": "skip_rows", "step": 1, "first": left_out, "last": left_out + 1}
    (run / "metrics.jsonl").write_text(json.dumps(entry) + "\n", encoding="utf-8")
    code, out, _ = distil("replay", run, "--step", 2)
    _, lines, _ = distil("replay", run, "--step", 2, "--json")
    assert code == 0
    for text, line in zip(out.splitlines()[2:6], lines.splitlines(), strict=True):
        row = json.loads(line)
        assert text.endswith("left out by --skip-rows") == row["skipped"]
        assert row["skipped"] == (row["row"] == left_out)
        assert text.split()[4:6] == [str(row["row"]), str(len(row["masks"]))]
