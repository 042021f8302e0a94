"""Check that control characters in titles, names, licences and paths are printed escaped."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from data_prep.publish.card import dataset_card
from data_prep.shards import load_manifest
from launch.cli import main
from launch.torchrun.attempt import say
from pretrain.export.card import model_card

EVIL = "\x1b]0;owned\x07\x1b[2J\u202e\x9b31m\u2028"
WORDS = [f"{a}{b}" for a in "klmn" for b in "opqr"]


def is_harmless(text: str) -> bool:
    return all(c == "\n" or c.isprintable() for c in text)


@pytest.fixture
def distil(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Return a function from arguments to exit code and all output."""

    def run(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["distil", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), "".join(capsys.readouterr())

    return run


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Write a corpus config with a hostile name of a file, source, licence, id, title and URL."""
    records = [
        {"text": " ".join(WORDS[n:] + WORDS[:n]), "id": f"{EVIL}{n}", "title": EVIL, "url": EVIL}
        for n in range(3)
    ]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    source = tmp_path / f"texts{EVIL}.jsonl"
    source.write_text(lines, encoding="utf-8")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (tmp_path / "vocab.txt").write_text("\n".join([*special, *WORDS]) + "\n", encoding="utf-8")
    fields = {"id_field": "id", "title_field": "title", "url_field": "url"}
    values: dict[str, Any] = {
        "output": str(tmp_path / f"shards{EVIL}"),
        "tokenizer": str(tmp_path / "vocab.txt"),
        "sources": [
            {"kind": "jsonl", "path": str(source), "licence": EVIL, "name": EVIL, **fields}
        ],
        "row_length": 18,
        "validation": 0,
        "workers": 1,
        "deduplicate": {"documents": "exact"},
    }
    (tmp_path / "corpus.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return tmp_path / "corpus.yaml"


def test_commands_of_a_corpus_print_no_control_characters(
    distil: Callable[..., tuple[int, str]], corpus: Path
) -> None:
    shards = yaml.safe_load(corpus.read_text(encoding="utf-8"))["output"]
    commands: list[tuple[int, tuple[object, ...]]] = [
        (0, ("prepare", corpus, "--dry-run")),
        (0, ("prepare", corpus)),
        (0, ("prepare", corpus)),
        (0, ("inspect", shards)),
        (0, ("inspect", shards, "--leftovers")),
        (0, ("audit", shards, "--row", 0)),
        (0, ("audit", shards, "--document", f"{EVIL}1")),
        (2, ("audit", shards, "--document", f"{EVIL}9")),
        (2, ("audit", shards, "--document", "x", "--source", EVIL + "x")),
        (2, ("prepare", corpus, f"sources.0.path={EVIL}")),
        (2, ("prepare", corpus, f"{EVIL}=3")),
        (2, ("prepare", f"{EVIL}.yaml")),
        (0, ("verify", shards)),
    ]
    for code, arguments in commands:
        ended, screen = distil(*arguments)
        assert (ended, is_harmless(screen)) == (code, True), (arguments, screen)
    (Path(shards) / "train-00000.arrow").write_bytes(b"")
    for name in ("verify", "inspect"):
        ended, screen = distil(name, shards)
        assert (ended, is_harmless(screen)) == (2, True), screen
    assert is_harmless(str(dataset_card(EVIL, load_manifest(shards))))


def test_commands_of_a_run_print_no_control_characters(
    distil: Callable[..., tuple[int, str]], run: Path, tmp_path: Path
) -> None:
    config = yaml.safe_load(run.read_text(encoding="utf-8"))
    config["output"] = f"{tmp_path}/out{EVIL}"  # no override: YAML takes no such characters
    hostile = tmp_path / f"run{EVIL}.yaml"
    hostile.write_text(yaml.safe_dump(config), encoding="utf-8")
    for code, arguments in (
        (0, ("launch", hostile, "--dry-run")),
        (0, ("pretrain", hostile, "train.max_steps=1")),
        (2, ("pretrain", hostile, "objective={}", f"teacher={tmp_path}/{EVIL}", "model=null")),
        (2, ("pretrain", hostile, f"train.{EVIL}=1")),
        (2, ("evaluate", tmp_path / EVIL, tmp_path / EVIL)),
        (2, ("replay", tmp_path / EVIL, "--step", 1)),
        (2, ("export", tmp_path / EVIL, tmp_path / "exported")),
    ):
        ended, screen = distil(*arguments)
        assert (ended, is_harmless(screen)) == (code, True), (arguments, screen)
    ended, screen = distil("export", config["output"], tmp_path / f"exported{EVIL}")
    assert (ended, is_harmless(screen)) == (0, True)


def test_a_traceback_prints_no_control_characters(
    distil: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise KeyError(0) from LookupError(EVIL)

    monkeypatch.setattr("launch.cli.app", fail)
    ended, screen = distil()
    assert ended == 1 and "Traceback" in screen and is_harmless(screen)


def test_the_supervisor_prints_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    say(f"error: {EVIL}")
    assert is_harmless(capsys.readouterr().err)


def test_cards_hold_no_control_characters() -> None:
    parameters = SimpleNamespace(numel=lambda: 3)
    student: Any = SimpleNamespace(
        config=SimpleNamespace(num_hidden_layers=1), parameters=lambda: [parameters]
    )
    section = {"key": EVIL}
    state = {
        "config": {
            **dict.fromkeys(("model", "student", "masking", "optimizer"), section),
            "objective": {"name": "distilbert"},
            "train": {**section, "max_steps": 1},
            "teacher": EVIL,
        },
        "teacher": {"name": EVIL, "revision": EVIL, "sha256": "0" * 64},
        **{"step": 1, "num_steps": 1, "tokens": 1, "shards": "0" * 64},
        **{"evaluation": {}, "evaluation_step": 0, "skip_rows": []},
        "sources": [{"name": EVIL, "kind": "text", "documents_kept": 1, "licence": EVIL}],
    }
    assert is_harmless(str(model_card(student, state)))


def test_a_real_terminal_gets_no_control_characters(tmp_path: Path) -> None:
    """Let our own colours and bars pass, but no control character of a string from outside."""
    program = (
        "import sys\n"
        "from launch.console import Training\n"
        "from launch.console import print_table\n"
        "with Training() as progress:\n"
        "    progress.say(sys.argv[1])\n"
        "    progress.step(1, 2, {})\n"
        "print_table(['name'], [[sys.argv[1]]])\n"
    )
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", program, EVIL], stdout=terminal, stderr=terminal, stdin=terminal
    )
    os.close(terminal)
    seen = bytearray()
    while True:
        try:
            data = os.read(controller, 4096)
        except OSError:  # its end, on Linux
            break
        if not data:
            break
        seen += data
    os.close(controller)
    assert process.wait(60) == 0
    text = seen.decode()
    assert "owned" in text and "training" in text
    for part in ("\x07", "\x1b]", "\x1b[2J", "\u202e", "\x9b", "\u2028"):
        assert part not in text
