"""Check that passwords and signatures in URLs are never printed, wherever the URL stands."""

import json
import os
import sys
import time
from pathlib import Path

import pytest
from support.processes import assert_refused
from support.small_corpora import write

from data_prep.disk.credentials import masked
from launch.cli import main
from launch.torchrun import failures

URL = "https://me:hunter2@host.invalid/data?signature=abcdef123"
SECRETS = ("hunter2", "abcdef123")


@pytest.fixture
def _rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process record its failures as rank 0."""
    monkeypatch.setenv("DISTIL_HEARTBEATS", str(tmp_path))
    monkeypatch.setenv("RANK", "0")


MASKED = {
    "user and query": (URL, "https://host.invalid/data"),
    "port and fragment": ("at https://me:p@h:80/x?a=b#c, then", "at https://h:80/x then"),
    "a glob": ("s3://key:secret@bucket/a?.jsonl", "s3://bucket/a?.jsonl"),
    "a token": ("'gs://b/x?token=abc' is", "'gs://b/x' is"),
    "one slash": ("https:/me:p@h/x", "https:/h/x"),
    "no host": ("'https://me:word'. Use", "'https://'. Use"),
    "nothing": ("http://host:80/x hf://datasets/me/data@main",) * 2,
    "no URL": ("a/b@main, me@host.org: x=y?",) * 2,
}


@pytest.mark.parametrize(("text", "shown"), MASKED.values(), ids=MASKED)
def test_only_credentials_of_urls_are_masked(text: str, shown: str) -> None:
    assert masked(text) == shown


MISTAKES: dict[str, tuple[str, dict[str, object], list[str]]] = {
    "a number": ("prepare", {"row_length": URL}, []),
    "a tokenizer": ("prepare", {"tokenizer": URL}, []),
    "a key": ("prepare", {URL: 1}, []),
    "a list": ("prepare", {"sources": [{"kind": "text", "path": "x", "licence": [URL]}]}, []),
    "a kind": ("prepare", {"sources": [{"kind": URL, "path": "x"}]}, []),
    "a path of keys": ("prepare", {}, [f"sources.{URL}=1"]),
    "an override": ("prepare", {}, [URL]),
    "a value": ("prepare", {}, [f"row_length=[{URL}"]),
    "a teacher": ("pretrain", {"teacher": URL}, []),
    "a teacher on s3": ("pretrain", {"teacher": URL.replace("https", "s3")}, []),
    "shards": ("pretrain", {"shards": URL}, []),
    "a launch's shards": ("launch", {"shards": URL}, ["--hardware", "cpu"]),
    "a launch": ("launch", {"shards": "x"}, ["--hardware", "cpu", f"teacher={URL}"]),
}


@pytest.mark.parametrize(("command", "changes", "options"), MISTAKES.values(), ids=MISTAKES)
@pytest.mark.usefixtures("_rank")
def test_a_mistake_with_a_url_shows_no_password(
    command: str,
    changes: dict[str, object],
    options: list[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_run = {"shards": "x", "teacher": "x"}
    of_corpus = {"tokenizer": "x", "sources": [{"kind": "text", "path": str(tmp_path)}]}
    values = {"output": str(tmp_path / "out"), **(of_corpus if command == "prepare" else of_run)}
    path = write(tmp_path / "config.yaml", values | changes)
    monkeypatch.setattr(sys, "argv", ["distil", command, str(path), *options])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capfd.readouterr()
    assert_refused((int(ended.value.code or 0), *said))
    recorded = (tmp_path / "failure-00000.json").read_text()
    for text in (*said, recorded):
        assert [secret for secret in SECRETS if secret in text] == []


@pytest.mark.usefixtures("_rank")
def test_a_bug_shows_no_password_either(tmp_path: Path) -> None:
    try:
        raise AssertionError(URL)
    except AssertionError as error:
        failures.record(error, 1, str(error))
    (found,) = failures.read_failures(tmp_path).values()
    assert "host.invalid/data" in found.message and "host.invalid/data" in found.traceback
    assert all(secret not in json.dumps(vars(found)) for secret in SECRETS)
    assert os.listdir(tmp_path) == ["failure-00000.json"]


def test_a_long_word_takes_no_longer_than_its_length() -> None:
    # A pattern that was tried at each letter took half a minute for 100,000 of them.
    start = time.monotonic()
    for text in ("a" * 3_000_000, "a.b-" * 700_000):
        assert masked(text) == text
    assert time.monotonic() - start < 60
