"""Check the options of `distil prepare`, as typed at a terminal."""

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.processes import ROOT, assert_refused, in_a_process
from support.small_corpora import corpus_values, write

from data_prep.shards import load_manifest

Distil = Callable[..., Any]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Write the config of a corpus of Wikipedia-like records in two row lengths."""
    lines = [
        {"id": str(i), "title": f"Title {i}", "text": f"Word{i} is the word number {i} ( , {i})."}
        for i in range(200)
    ]
    (tmp_path / "w.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = {"kind": "jsonl", "path": str(tmp_path / "w.jsonl"), "cleaning": "wikipedia"}
    source |= {"id_field": "id", "title_field": "title", "licence": "CC-BY-SA-4.0"}
    values = corpus_values(tmp_path, [], source, row_length=[32, 64])
    return write(tmp_path / "corpus.yaml", values | {"tokenizer": {"train": {"vocab_size": 300}}})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "1/2"], "--task: needs --stage"),
        (["--stage", "read"], "--stage read: no such stage: one of examples, extract, match"),
        (["--stage", "extract", "--task", "0/2"], "--task 0/2: not a task: i/N with i from 1 to N"),
        (["--stage", "extract", "--task", "two"], "--task two: not a task"),
        (["--stage", "pack"], "units of stage extract are missing"),
        (["--finalize"], "units of stage extract are missing"),
        (["--finalize", "--dry-run"], "--stage, --finalize and --dry-run: use one of them"),
        (["--dry-run", "--upload", "x"], "--upload and --record: need finished shards"),
        (["sources.0.languages=[eng]"], "'eng' is not a language code such as en or de"),
        (["output=s3://bucket/x"], "output: a local folder; `--upload URL` copies the shards"),
        (["--upload", ""], "--upload: is empty"),
        (["--accept-code", "--finalize"], "--accept-code: keeps finished shards"),
        (["--stage", ""], "--stage : no such stage"),
        (["row_length=[32, 32]"], "row_length: the same length is there twice"),
        (["deduplicate.documents=fuzzy"], "deduplicate.documents"),
        (["decontaminate.files=[/no/dev.tsv]"], "/no/dev.tsv"),
    ],
)
def test_a_mistake_is_one_line(
    distil: Distil, config: Path, arguments: list[str], message: str
) -> None:
    assert_refused(distil("prepare", config, *arguments), message)


def test_shards_of_other_code_are_kept_on_request(
    distil: Distil, config: Path, tmp_path: Path
) -> None:
    assert distil("prepare", config).code == 0
    root = tmp_path / "edited"
    shutil.copytree(ROOT / "data_prep", root / "data_prep")
    for package in ("launch", "pretrain", "configs"):
        (root / package).symlink_to(ROOT / package)
    cleaning = root / "data_prep" / "text" / "cleaning.py"
    cleaning.write_text(cleaning.read_text() + "\nEDITED = True\n")
    edited = partial(in_a_process, cwd=root, environment={"PYTHONPATH": str(root)})
    ended = edited("prepare", config)
    assert_refused(ended)
    assert re.search(r"source: \w{12} there, \w{12} here.*--accept-code", ended[2])
    code, out, _ = edited("prepare", config, "--accept-code")
    assert code == 0 and out.count("kept, this code is accepted") == 2
    for again in (edited("prepare", config), distil("prepare", config)):
        assert again[0] == 0 and again[1].count("up to date") == 2, again


def test_stages_upload_and_questions(distil: Distil, config: Path, tmp_path: Path) -> None:
    estimated = distil("prepare", config, "--dry-run")
    assert estimated.code == 0 and "200 documents, 200 kept" in estimated.out
    assert "rows of 32" in estimated.out and not (tmp_path / "shards").exists()
    for stage in ("examples", "extract", "match", "deduplicate", "vocabulary", "pack"):
        done = distil("prepare", config, "--stage", stage)
        assert done.code == 0, done.err
    (tmp_path / "bucket").mkdir()
    url = f"file://{tmp_path}/bucket/mine"
    done = distil("prepare", config, "--finalize", "--upload", url)
    assert done.code == 0, done.out + done.err
    for length in ("32", "64"):
        folder = tmp_path / "shards" / length
        assert load_manifest(tmp_path / "bucket" / "mine" / length) == load_manifest(folder)
    again = distil("prepare", config, "--upload", url)
    assert again.code == 0 and again.out.count("up to date") == 4
    shards = tmp_path / "shards" / "32"
    leftovers = distil("inspect", shards, "--leftovers")
    assert leftovers.out.startswith("w.jsonl: 0 leftover(s)")
    row = distil("inspect", shards, "--row", "0", "--json").out.splitlines()
    found = json.loads(row[0])
    assert found["licence"] == "CC-BY-SA-4.0" and found["title"] == f"Title {found['document']}"
