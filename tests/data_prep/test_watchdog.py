"""Check that a document that never ends fails its unit, even inside a C call."""

import re
import time
from pathlib import Path

import pytest
from support.processes import ROOT, python

from data_prep.pipeline.engines import started
from data_prep.pipeline.processes import FailedError
from data_prep.pipeline.watchdog import FILE, last_seen, watchdog

ENDLESS = re.compile("(a+)+$")


def hang(folder: Path) -> None:
    """Run a catastrophic regular expression: no Python code runs until it returns."""
    folder.mkdir(exist_ok=True)
    with watchdog(folder, seconds=2.0) as starts:
        starts("page 11")
        time.sleep(0.6)  # it is armed again after half a second
        starts("page 12")
        if folder.name == ".bad":
            ENDLESS.match("a" * 60 + "b")


def test_the_process_ends_with_a_traceback(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path += sys.argv[2:]\n"
        "from pathlib import Path\nfrom test_watchdog import hang\nhang(Path(sys.argv[1]) / '.bad')"
    )
    here = Path(__file__).parent
    done = python("-c", code, tmp_path, here, ROOT, here.parent)
    assert done.returncode == 1
    assert "Timeout" in done.stderr and "in hang" in done.stderr
    assert last_seen(tmp_path) == ["page 12"]


def test_a_pool_says_that_a_worker_died(tmp_path: Path) -> None:
    with pytest.raises(FailedError, match="took too long") as error, started(2) as run:
        run(hang, [tmp_path / "good", tmp_path / ".bad"], lambda done, total: None)
    assert list(error.value.failures) == [1]
    assert last_seen(tmp_path) == ["page 12"]
    assert not (tmp_path / "good" / FILE).exists()


def test_a_worker_that_finishes_while_the_others_are_listed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (".bad", ".good"):
        (tmp_path / name).mkdir()
        (tmp_path / name / FILE).write_bytes(name.encode() + bytes(9))
    listed = Path.glob

    def glob(path: Path, pattern: str) -> list[Path]:
        found = list(listed(path, pattern))
        (tmp_path / ".good" / FILE).unlink(missing_ok=True)
        return found

    monkeypatch.setattr(Path, "glob", glob)
    assert last_seen(tmp_path) == [".bad"]
