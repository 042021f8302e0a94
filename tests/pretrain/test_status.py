"""Check that exit_status.json agrees with the screen and the exit code."""

import errno
import json
import os
import traceback
from pathlib import Path
from typing import Any

import pytest
from support.runs import RECIPE, write_yaml

import pretrain.train
from data_prep import CorpusError
from launch.torchrun import failures
from pretrain import NonFiniteError, RunError

ENDS: list[tuple[BaseException, int, str]] = [
    (ValueError("a bug of ours"), 1, "ValueError: a bug of ours"),
    (AssertionError(), 1, "AssertionError"),
    (KeyError("rows"), 1, "KeyError: 'rows'"),
    (KeyboardInterrupt(), 130, "KeyboardInterrupt"),
    (SystemExit(2), 2, "another process"),
    (CorpusError("a damaged block"), 2, "a damaged block"),
    (RunError("a mistake"), 2, "a mistake"),
    (MemoryError(), 2, "out of memory with micro_batch_size 4"),
    (OSError(errno.ENOSPC, "No space left on device"), 2, "No space left on device"),
    (NonFiniteError("a loss"), 3, "a loss"),
]


@pytest.mark.parametrize(("error", "code", "text"), ENDS, ids=lambda value: type(value).__name__)
def test_the_status_file_agrees_with_the_exit_code(
    tmp_path: Path,
    teacher_folder: Path,
    run_config: Any,
    distil: Any,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    text: str,
) -> None:
    values = run_config(tmp_path / "run", teacher_folder, **RECIPE)

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(pretrain.train, "train_step", fail)
    ended = distil("pretrain", write_yaml(values))
    status = json.loads((tmp_path / "run" / "exit_status.json").read_text(encoding="utf-8"))
    assert (ended.code, status["exit_code"]) == (code, code)
    assert text in status["error"] and status["ended"] == "failed"
    shown = f"error: {status['error']}" in ended.err
    assert shown or code not in (2, 3) or isinstance(error, SystemExit)


def test_a_bug_without_a_message_is_recorded_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, distil: Any
) -> None:
    """Check that it did not follow from another rank's error, so that its traceback is shown."""
    monkeypatch.setenv("DISTIL_HEARTBEATS", str(tmp_path))
    monkeypatch.setenv("RANK", "0")

    def fail() -> None:
        raise AssertionError

    monkeypatch.setattr("launch.cli.app", fail)
    distil()
    failure = failures.read_failures(tmp_path)[0]
    assert failure.message == "AssertionError" and not failure.follows


def test_a_hint_comes_from_the_error_alone() -> None:
    """Check that an earlier error that was handled gives no hint."""
    try:
        try:
            os.stat("/there/is/no/such/file")
        except OSError:
            {}["key"]
    except KeyError as error:
        text = "".join(traceback.format_exception(error))
    assert "No such file" in text
    values = {"rank": 0, "host": "here", "pid": 1, "time": 0.0, "exit_code": 1, "log_size": 0}
    failure = failures.Failure(type="KeyError", message="KeyError: 'key'", traceback=text, **values)
    assert failure.hint == ""
