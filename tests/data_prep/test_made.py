"""Check what a folder was made of, and that one is replaced whole."""

import json
import os
import time
from pathlib import Path

import pytest

from data_prep.disk import Busy
from data_prep.disk.made import CARD, UNKNOWN, aside, beside, difference, foreign, seal

INPUTS = {"model": ["a", "1"], "rows": 0}


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """Return the record of a folder with two files and a card."""
    with aside(tmp_path / "made", who="a test") as folder:
        (folder / "inner").mkdir()
        for name in ("model", "inner/more", CARD):
            (folder / name).write_text(name)
        seal(folder / "record.json", INPUTS, figures={"x": 1})
    return tmp_path / "made" / "record.json"


def test_a_folder_is_that_of_its_inputs_until_one_or_a_file_changes(record: Path) -> None:
    assert difference(record, INPUTS) is None and foreign(record, [CARD]) is None
    assert json.loads(record.read_bytes())["figures"] == {"x": 1}
    (record.parent / CARD).write_text("a user's")
    assert difference(record, {**INPUTS, "new": None}) is None  # a key that it lacked is empty
    for changes in ({"rows": 3}, {"model": ["a", "2"]}, {"new": 1}, {"rows": UNKNOWN}):
        assert difference(record, {**INPUTS, **changes}), changes
    (record.parent / "model").write_text("other")
    assert difference(record, INPUTS) == "model has changed"
    (record.parent / "model").unlink()
    assert difference(record, INPUTS) == "model has changed"


def test_what_a_user_has_put_there_is_named(record: Path) -> None:
    folder = record.parent
    for make in (Path.mkdir, Path.touch, os.mkfifo, lambda path: path.symlink_to("nowhere")):
        make(folder / "mine")
        assert foreign(record, [CARD]) == "mine" and difference(record, INPUTS)
        (folder / "mine").rmdir() if (folder / "mine").is_dir() else (folder / "mine").unlink()
    for damaged in ("", "[]", '{"inputs": {}, "files": null}'):
        record.write_text(damaged)
        assert difference(record, INPUTS) and foreign(record, [CARD])


def test_the_folder_behind_a_link_is_replaced(record: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("made")
    with aside(tmp_path / "link", who="a test") as folder:
        (folder / "new").touch()
    assert (tmp_path / "link").is_symlink() and os.listdir(tmp_path / "made") == ["new"]
    assert sorted(os.listdir(tmp_path)) == ["link", "made"]


def test_an_end_at_any_rename_leaves_a_whole_folder_or_none(
    record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: Path, target: Path) -> Path:
        if path == record.parent or path.name == "new":
            raise KeyboardInterrupt
        return rename(path, target)

    rename = Path.rename
    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(KeyboardInterrupt), aside(record.parent, who="a test"):
        pass
    assert difference(record, INPUTS) is None and os.listdir(record.parents[1]) == ["made"]


def test_what_dead_processes_left_goes_and_a_living_one_refuses(tmp_path: Path) -> None:
    for name in (".tmp-made-01234567", ".tmp-made-01234567.new", ".tmp-made-89abcdef.new"):
        (tmp_path / name).mkdir()
    os.utime(tmp_path / ".tmp-made-01234567.new", (time.time() - 60,) * 2)
    with beside(tmp_path / "made", who="a test"):
        assert {".tmp-made-89abcdef.new"} == {p.name for p in tmp_path.glob("*.new")}
        with (
            pytest.raises(Busy, match="another process of a test"),
            aside(tmp_path / "made", who="a test"),
        ):
            pass
    assert os.listdir(tmp_path) == [".tmp-made-89abcdef.new"]
