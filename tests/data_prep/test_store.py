"""Prepare a corpus through a store, as machines do that share no output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.preparing import SMALL, contents, flip_bit
from support.processes import ROOT

from data_prep import CorpusError
from data_prep.config import CorpusConfig
from data_prep.pipeline.plan import STAGES
from data_prep.prepare import finalise, prepare, prepare_stage
from data_prep.shards import load_manifest

RUN = """
import sys
from data_prep.config import CorpusConfig
from data_prep.prepare import prepare
if __name__ == "__main__":
    config = CorpusConfig.model_validate_json(open(sys.argv[1]).read())
    prepare(config, part_bytes=2000, piece_bytes=500)
"""
LEVELS = {"documents": "near", "paragraphs": "exact"}


@pytest.fixture
def expected(make_config: Any, tmp_path: Path) -> str:
    """Return the digest of the corpus without a store."""
    plain = make_config(output=tmp_path / "plain", deduplicate=LEVELS, keep_text=True)
    return prepare(plain, **SMALL).digest


@pytest.fixture
def make(make_config: Any, tmp_path: Path) -> Any:
    """Return a function from a machine's name to its config; all have one store."""

    def config(machine: str, **changes: Any) -> CorpusConfig:
        keys = {"deduplicate": LEVELS, "keep_text": True, "work": str(tmp_path / "store")}
        found: CorpusConfig = make_config(output=tmp_path / machine, **keys, **changes)
        return found

    return config


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of temporary files of this test."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    return folder


def test_machines_that_share_a_store_make_the_same_bytes(
    make: Any, expected: str, tmp_path: Path, scratch: Path
) -> None:
    """Give the tasks of each stage to two machines, whose outputs are apart."""
    for stage in STAGES:
        for number, machine in ((1, "a"), (2, "b")):
            prepare_stage(make(machine), stage, number, 2, **SMALL)
        # Of what stages write, only records come here, and those that others have read.
        for machine in ("a", "b"):
            work = tmp_path / machine / ".work"
            files = {path.suffix for path in work.rglob("*") if path.is_file()}
            assert files <= {".json", ".lock"}, files
    manifest = finalise(make("c"), **SMALL)
    assert manifest.digest == load_manifest(tmp_path / "c").digest == expected
    assert contents(tmp_path / "store") == {}
    assert not [*scratch.rglob("scratch-*")]


def test_a_run_that_is_killed_continues(
    make: Any, expected: str, tmp_path: Path, scratch: Path
) -> None:
    config = make("killed", workers=2)
    (tmp_path / "run.py").write_text(RUN, encoding="utf-8")
    (tmp_path / "config.json").write_text(config.model_dump_json(), encoding="utf-8")
    command = [sys.executable, str(tmp_path / "run.py"), str(tmp_path / "config.json")]
    store, kept = tmp_path / "store", dict[str, int]()
    for records in (2, 8):  # while documents are extracted, and later
        process = subprocess.Popen(
            command, start_new_session=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
        )
        end = time.monotonic() + 120
        while len(found := _records(store)) < records:
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.001)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert {name: found[name] for name in kept} == kept  # what was finished is not made again
        kept = found
    assert prepare(config, **SMALL).digest == expected
    assert not [*scratch.rglob("scratch-*")]  # the folders of killed tasks, too


def _records(store: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in store.glob("*/*.json")}


def test_a_file_that_is_altered_in_the_store_is_refused(
    make: Any, expected: str, tmp_path: Path
) -> None:
    config = make("a")
    for stage in ("examples", "extract", "match", "deduplicate", "vocabulary"):
        prepare_stage(config, stage, **SMALL)
    part = sorted((tmp_path / "store" / "extract").glob("*/part-00000.arrow"))[0]
    flip_bit(part)
    with pytest.raises(CorpusError, match=rf"{part.parent.name}/part-00000.arrow is not what its"):
        prepare(config, **SMALL)
    part.unlink()  # as the message says
    assert prepare(config, **SMALL).digest == expected


@pytest.mark.parametrize("what", ["cut", "no record", "half a record", "another record"])
def test_what_did_not_arrive_is_made_again(
    make: Any, expected: str, tmp_path: Path, what: str
) -> None:
    config = make("a")
    prepare_stage(config, "extract", **SMALL)
    first, second, *_ = sorted((tmp_path / "store" / "extract").glob("*.json"))
    if what == "cut":
        part = first.with_suffix("") / "part-00000.arrow"
        part.write_bytes(part.read_bytes()[:-1])
    elif what == "no record":
        first.unlink()
    elif what == "half a record":
        first.write_bytes(first.read_bytes()[:100])
    else:
        first.write_bytes(second.read_bytes())
    assert prepare(config, **SMALL).digest == expected


def test_a_store_that_is_not_reached_is_named(make_config: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(CorpusError, match=r"file/store.*cannot be"):
        prepare(make_config(work=str(tmp_path / "file" / "store")), **SMALL)
    with pytest.raises(CorpusError, match=r"nothing://bucket.*: "):
        prepare(make_config(work="nothing://bucket/work"), **SMALL)


def test_the_store_is_no_part_of_the_corpus(make: Any, expected: str, tmp_path: Path) -> None:
    manifest = prepare(make("a"), **SMALL)
    assert "store" not in json.dumps(manifest.model_dump(mode="json"))
    plain = make("a").model_copy(update={"work": None})
    assert prepare(plain, **SMALL).digest == manifest.digest == expected  # up to date
