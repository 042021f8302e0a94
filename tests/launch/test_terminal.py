"""Check that control characters in titles, names, licences and paths are printed escaped."""

import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.small_corpora import three_texts, write
from transformers import DistilBertConfig

from launch.console import Training
from launch.torchrun.attempt import say
from pretrain.export.card import About, model_card

EVIL = "\x1b]0;owned\x07\x1b[2J\u202e\x9b31m\u2028"
# A name of a file can only have characters of the locale's encoding, which may be ASCII.
NAME = EVIL.encode(sys.getfilesystemencoding(), "ignore").decode(sys.getfilesystemencoding())
Distil = Callable[..., Any]


def is_harmless(text: str) -> bool:
    return all(c == "\n" or c.isprintable() for c in text)


def assert_harmless(ended: tuple[int, str, str], code: int) -> None:
    found, out, err = ended
    assert (found, is_harmless(out + err)) == (code, True), out + err


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Write a corpus config with a hostile name of a file, source, licence, id, title and URL."""
    fields = [{"id": f"{EVIL}{n}", "title": EVIL, "url": EVIL} for n in range(3)]
    source = {"path": str(tmp_path / f"texts{NAME}.jsonl"), "licence": EVIL, "name": EVIL}
    values = three_texts(tmp_path, fields, source, output=str(tmp_path / f"shards{NAME}"))
    return write(tmp_path / "corpus.yaml", values)


def test_commands_of_a_corpus_print_no_control_characters(distil: Distil, corpus: Path) -> None:
    shards = f"{corpus.parent}/shards{NAME}"
    commands: list[tuple[int, tuple[object, ...]]] = [
        (0, ("prepare", corpus, "--dry-run")),
        (0, ("prepare", corpus)),
        (0, ("prepare", corpus)),
        (0, ("inspect", shards)),
        (0, ("inspect", shards, "--leftovers")),
        (0, ("inspect", shards, "--row", 0)),
        (2, ("inspect", shards, "--row", 9)),
        (2, ("prepare", corpus, f"sources.0.path={NAME}")),
        (2, ("prepare", corpus, f"{NAME}=3")),
        (2, ("prepare", f"{NAME}.yaml")),
        (0, ("verify", shards)),
    ]
    for code, arguments in commands:
        assert_harmless(distil(*arguments), code)
    (Path(shards) / "train-00000.arrow").write_bytes(b"")
    for name in ("verify", "inspect"):
        assert_harmless(distil(name, shards), 2)


def test_commands_of_a_run_print_no_control_characters(
    distil: Distil, run_values: dict[str, Any], tmp_path: Path
) -> None:
    # The output is not an override: YAML takes no such characters.
    config = {"output": f"{tmp_path}/out{NAME}", **run_values}
    hostile = write(tmp_path / f"run{NAME}.yaml", config)
    for code, arguments in (
        (0, ("launch", hostile, "--dry-run")),
        (0, ("pretrain", hostile, "train.max_steps=1")),
        (2, ("pretrain", hostile, "objective={}", f"teacher={tmp_path}/{NAME}", "model=null")),
        (2, ("pretrain", hostile, f"train.{EVIL}=1")),
        (2, ("evaluate", tmp_path / NAME, tmp_path / NAME)),
        (2, ("replay", tmp_path / NAME, "--step", 1)),
        (2, ("export", tmp_path / NAME, tmp_path / "exported")),
    ):
        assert_harmless(distil(*arguments), code)
    assert_harmless(distil("export", config["output"], tmp_path / f"exported{NAME}"), 0)


def test_a_traceback_prints_no_control_characters(
    distil: Distil, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise KeyError(0) from LookupError(EVIL)

    monkeypatch.setattr("launch.cli.app", fail)
    ended = distil()
    assert "Traceback" in ended.err
    assert_harmless(ended, 1)


def test_the_supervisor_prints_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    say(f"error: {EVIL}")
    assert is_harmless(capsys.readouterr().err)


def test_cards_hold_no_control_characters() -> None:
    parameters = SimpleNamespace(numel=lambda: 3)
    student: Any = SimpleNamespace(
        config=DistilBertConfig(n_layers=1),
        parameters=lambda: [parameters],
    )
    section = {"key": EVIL}
    state = {
        "config": {
            **dict.fromkeys(("model", "student", "masking", "optimizer"), section),
            "objective": {"name": "distilbert"},
            "train": {**section, "max_steps": 1, "global_batch_size": 1},
            "teacher": EVIL,
        },
        "teacher": {"name": EVIL, "revision": EVIL, "sha256": "0" * 64},
        **{"step": 1, "num_steps": 1, "tokens": 1, "shards": "0" * 64},
        **{"evaluation": {}, "evaluation_step": 0, "skip_rows": []},
        **{"row_length": 8, "num_processes": 1},
        "sources": [{"name": EVIL, "kind": "text", "documents_kept": 1, "licence": EVIL}],
    }
    about = About({"licence": EVIL, "base_model": EVIL}, {"processor": EVIL, "commit": EVIL})
    assert is_harmless(str(model_card(student, state, about=about)))


PROGRAM = """
import sys
from launch.console import Training, print_table
with Training() as progress:
    progress.say(sys.argv[1])
    progress.step(1, 2, {})
print_table(["name"], [[sys.argv[1]]])
"""


def on_a_terminal(program: str, *arguments: str) -> str:
    """Return what a program shows on a terminal of 80 columns."""
    controller, terminal = pty.openpty()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    environment = os.environ | {"COLUMNS": "80", "TERM": "xterm"}
    command = [sys.executable, "-c", program, *arguments]
    process = subprocess.Popen(command, env=environment, **streams)
    os.close(terminal)
    seen = bytearray()
    with suppress(OSError):  # its end, on Linux
        while data := os.read(controller, 4096):
            seen += data
    os.close(controller)
    assert process.wait(600) == 0
    return seen.decode()


def test_a_real_terminal_gets_no_control_characters(tmp_path: Path) -> None:
    """Let our own colours and bars pass, but no control character of a string from outside."""
    text = on_a_terminal(PROGRAM, NAME)
    assert "owned" in text and "training" in text
    for part in ("\x07", "\x1b]", "\x1b[2J", "\u202e", "\x9b", "\u2028"):
        assert part not in text


def test_a_terminal_breaks_no_number_and_no_command() -> None:
    warning = "warning: 10% of the corpus is read, of its rows and more rows: set it to 123,456,789"
    command = f"  distil evaluate {'a' * 90} b"
    program = f"from launch.console import show; show({warning!r}, {command!r})"
    first, second, third = on_a_terminal(program).splitlines()
    assert len(first) <= 80 and second == "  123,456,789" and third == command


def test_a_wide_table_is_split_between_columns() -> None:
    columns = ["", *(f"untrained {i}" for i in range(8))]
    row = ["a name of a run", *(f"{i}.5 ±0.25" for i in range(8))]
    program = f"from launch.console import print_table; print_table({columns!r}, [{row!r}])"
    out = re.sub(r"\x1b\[[0-9;]*m", "", on_a_terminal(program))
    assert all(len(line) <= 80 for line in out.splitlines())
    assert out.count("a name of a run") == 2 and out.count("untrained") == 8
    assert all(out.count(cell) == 1 for cell in row[1:])


def test_figures_of_any_task_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Show a task's own `accuracy`, which no LM head has."""
    Training().evaluation(3, {"accuracy": 0.5, "loss": 0.25})
    assert "validation, step 3: accuracy 0.500  weighted loss 0.250" in capsys.readouterr().out


@pytest.mark.parametrize("total", [10, 3_000_000])
def test_a_line_of_a_step_has_a_clock_and_fits_80_columns(
    total: int, capsys: pytest.CaptureFixture[str]
) -> None:
    training = Training()
    values = {"loss": 1.9056, "kl": 0.18, "mlm": 0.3975, "cosine": 0.2104, "grad_norm": 5.945}
    values |= {"learning_rate": 3e-4, "epoch": 0.1, "tokens": 202990.0, "time": 1.0, "elapsed": 2.0}
    values |= {"memory": 3e9, "tokens_per_second": 2355.5, "data_wait": 0.3, "cpu_seconds": 76.9}
    training.step(total // 2 - 1, total, values)
    training.step(total // 2, total, values)
    for line in capsys.readouterr().out.splitlines():
        assert len(line) <= 80 and re.match(r"\d\d:\d\d:\d\d \+0:00  step \d+/", line), line
        assert "weighted loss 1.906" in line
    assert "  eta " in line


def test_validation_figures_break_between_terms(capsys: pytest.CaptureFixture[str]) -> None:
    values = {f"term_{i}": 10.5 + i for i in range(8)}
    Training().evaluation(1_000_000, values)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    for i in range(8):
        assert f"term_{i} {10.5 + i:.3f}" in shown
