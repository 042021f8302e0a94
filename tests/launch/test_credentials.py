"""Check that passwords and signatures in URLs are never printed, wherever the URL stands."""

import json
import os
import sys
import time
from pathlib import Path

import pytest
from processes import assert_refused
from small_corpora import write

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


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (URL, "https://host.invalid/data"),
        ("at https://me:p@h:80/x?a=b#c, then", "at https://h:80/x then"),
        ("s3://key:secret@bucket/a?.jsonl", "s3://bucket/a?.jsonl"),
        ("'gs://b/x?token=abc' is", "'gs://b/x' is"),
        ("https:/me:p@h/x", "https:/h/x"),
        ("'https://me:word'. Use", "'https://'. Use"),
        (
            "http://host:80/x hf://datasets/me/data@main",
            "http://host:80/x hf://datasets/me/data@main",
        ),
        ("a/b@main, me@host.org: x=y?", "a/b@main, me@host.org: x=y?"),
    ],
    ids=[
        *("user and query", "port and fragment", "a glob", "a token", "one slash", "no host"),
        *("nothing", "no URL"),
    ],
)
def test_only_credentials_of_urls_are_masked(text: str, shown: str) -> None:
    assert masked(text) == shown


@pytest.mark.parametrize(
    ("command", "changes", "options"),
    [
        ("prepare", {"row_length": URL}, []),
        ("prepare", {"tokenizer": URL}, []),
        ("prepare", {URL: 1}, []),
        ("prepare", {"sources": [{"kind": "text", "path": "x", "licence": [URL]}]}, []),
        ("prepare", {"sources": [{"kind": URL, "path": "x"}]}, []),
        ("prepare", {}, [f"sources.{URL}=1"]),
        ("prepare", {}, [f"{URL}"]),
        ("prepare", {}, [f"row_length=[{URL}"]),
        ("pretrain", {"teacher": URL}, []),
        ("pretrain", {"teacher": URL.replace("https", "s3")}, []),
        ("pretrain", {"shards": URL}, []),
        ("launch", {"shards": URL}, ["--hardware", "cpu"]),
        ("launch", {"shards": "x"}, ["--hardware", "cpu", f"teacher={URL}"]),
    ],
    ids=[
        *("a number", "a tokenizer", "a key", "a list", "a kind", "a path of keys", "an override"),
        *("a value", "a teacher", "a teacher on s3", "shards", "a launch's shards", "a launch"),
    ],
)
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
