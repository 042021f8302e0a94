"""Prepare a corpus through a store, as machines do that share no output."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from support import warm
from support.preparing import SMALL, contents, flip_bit
from support.processes import ROOT

from data_prep import CorpusError
from data_prep.config import CorpusConfig
from data_prep.pipeline.plan import STAGES, Plan
from data_prep.pipeline.store import Needed, Store, StoredStage, _scratch
from data_prep.pipeline.units import run_unit
from data_prep.prepare import finalise, prepare, prepare_stage
from data_prep.shards import load_manifest
from data_prep.shards.writing import file_record

RUN = """
import sys
from data_prep.config import CorpusConfig
from data_prep.prepare import prepare
if __name__ == "__main__":
    config = CorpusConfig.model_validate_json(open(sys.argv[1]).read())
    prepare(config, part_bytes=2000, piece_bytes=500)
"""
LEVELS = {"documents": "near", "paragraphs": "exact"}
DIGEST: list[str] = []


@pytest.fixture
def expected(make_config: Any, tmp_path: Path) -> str:
    """Return the digest of the corpus without a store, which all tests here have."""
    plain = make_config(output=tmp_path / "plain", deduplicate=LEVELS, keep_text=True)
    if not DIGEST:
        DIGEST.append(prepare(plain, **SMALL).digest)
    return DIGEST[0]


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
        for machine in ("a", "b"):  # only the store has what stages write
            work = tmp_path / machine / ".work"
            assert {path.suffix for path in work.rglob("*") if path.is_file()} <= {".lock"}
    manifest = finalise(make("c"), **SMALL)
    assert manifest.digest == load_manifest(tmp_path / "c").digest == expected
    assert [*(tmp_path / "store").iterdir()] == []
    assert not [*scratch.rglob("scratch-*")]


def test_a_run_that_is_killed_continues(
    make: Any, expected: str, tmp_path: Path, scratch: Path
) -> None:
    config = make("killed", workers=2)
    (tmp_path / "run.py").write_text(RUN, encoding="utf-8")
    (tmp_path / "config.json").write_text(config.model_dump_json(), encoding="utf-8")
    command = [tmp_path / "run.py", tmp_path / "config.json"]
    store, kept = tmp_path / "store", dict[str, int]()
    for records in (2, 8):  # while documents are extracted, and later
        process = warm.Process(*command, env=os.environ | {"PYTHONPATH": str(ROOT)})
        end = time.monotonic() + 600
        while len(found := _records(store)) < records:
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.01)
        os.killpg(process.real, signal.SIGKILL)
        process.wait()
        assert {name: found[name] for name in kept} == kept  # what was finished is not made again
        kept = found
    assert prepare(config, **SMALL).digest == expected
    assert not [*scratch.rglob("scratch-*")]  # the folders of killed tasks, too


def _records(store: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in store.glob("*/*/*.json")}


def test_a_file_that_is_altered_in_the_store_is_refused(
    make: Any, expected: str, tmp_path: Path
) -> None:
    config = make("a")
    for stage in ("examples", "extract", "match", "deduplicate", "vocabulary"):
        prepare_stage(config, stage, **SMALL)
    parts = tmp_path.glob("store/*/extract/*/part-00000.arrow")
    part = max(parts, key=lambda path: path.stat().st_size)  # not one of duplicates alone
    message = rf"{part.parent.name}/part-00000.arrow: missing, or not what its.*--stage extract`"
    for change in (flip_bit, Path.unlink):
        change(part)
        with pytest.raises(CorpusError, match=message):
            prepare_stage(config, "pack", **SMALL)
        prepare_stage(config, "extract", **SMALL)  # as the message says
        assert part.exists()
    flip_bit(part)
    with pytest.raises(CorpusError, match=message):
        prepare(config, **SMALL)
    assert prepare(config, **SMALL).digest == expected  # the same command makes it again


def test_a_machine_with_another_tokenizer_is_refused(
    make: Any, expected: str, tmp_path: Path
) -> None:
    """Let the file of this machine differ from the one that the unit was planned with."""
    config, vocabulary = make("a"), tmp_path / "vocab.txt"
    (unit,) = Plan(config, **SMALL).units("vocabulary")
    same = vocabulary.read_text()
    vocabulary.write_text(same.replace("text", "texts"))
    with pytest.raises(CorpusError, match=r"vocab\.txt: on .* another tokenizer than where"):
        run_unit(STAGES["vocabulary"].run, unit)
    vocabulary.write_text(same)
    assert prepare(config, **SMALL).digest == expected


@pytest.mark.parametrize(
    "what", ["cut", "no record", "half a record", "another record", "an edited record"]
)
def test_what_did_not_arrive_is_made_again(
    make: Any, expected: str, tmp_path: Path, what: str
) -> None:
    config = make("a")
    prepare_stage(config, "extract", **SMALL)
    records = sorted(tmp_path.glob("store/*/extract/*.json"))
    first, second, *_ = [r for r in records if [*r.with_suffix("").glob("part-*")]]
    if what == "cut":
        part = first.with_suffix("") / "part-00000.arrow"
        part.write_bytes(part.read_bytes()[:-1])
    elif what == "no record":
        first.unlink()
    elif what == "half a record":
        first.write_bytes(first.read_bytes()[:100])
    elif what == "another record":
        first.write_bytes(second.read_bytes())
    else:
        values = json.loads(first.read_bytes())
        values["result"]["documents_in"] += 7
        first.write_text(json.dumps(values), encoding="utf-8")
    manifest = prepare(config, **SMALL)
    assert manifest.digest == expected
    assert sum(source.documents_in for source in manifest.sources) == 60


def test_a_store_that_cannot_be_reached_costs_nothing_that_is_finished(
    make_config: Any, tmp_path: Path
) -> None:
    prepare_stage(make_config(), "extract", **SMALL)
    before = contents(tmp_path / "out" / ".work")
    (tmp_path / "file").write_text("", encoding="utf-8")
    told: list[str] = []
    unreached = make_config(work=str(tmp_path / "file" / "store"))
    with pytest.raises(CorpusError, match=r"11 of 33 units .* and 22 were not tried"):
        prepare_stage(unreached, "extract", warn=told.append, **SMALL)
    with pytest.raises(CorpusError, match=r"file/store/.*: cannot be written"):
        prepare(unreached, warn=told.append, **SMALL)
    assert len(told) == 11 and all("file/store" in text for text in told)
    with pytest.raises(CorpusError, match=r"nothing://bucket.*: "):
        prepare(make_config(work="nothing://bucket/work"), **SMALL)
    records = {name: data for name, data in before.items() if name.endswith(".json")}
    after = contents(tmp_path / "out" / ".work")
    assert records and {name: after.get(name) for name in records} == records


@pytest.mark.parametrize(
    ("work", "message"),
    [
        ("s3://", "give the path of a folder, or a URL"),
        ("s3//bucket/work", "give the path of a folder, or a URL"),
        ("s3:/bucket/work", "give the path of a folder, or a URL"),
        ("file:///", "give the path of a folder, or a URL"),
        ("simplecache::s3://bucket/work", "give the path of a folder, or a URL"),
        ("s3://bucket/work[2]", "give the path of a folder, or a URL"),
        ("memory://work", "memory:// is not shared"),
        ("https://host/work", "https:// is not shared, or is only read"),
        ("HERE/texts/work", "work lies in HERE/texts"),
        ("HERE/texts", "work lies in HERE/texts"),
        ("HERE/out/work", "work lies in HERE/out"),
        ("HERE", "work lies in HERE/out, or the other way round"),
    ],
)
def test_places_that_cannot_serve_are_refused(
    make_config: Any, tmp_path: Path, work: str, message: str
) -> None:
    with pytest.raises(ValidationError, match=re.escape(message.replace("HERE", str(tmp_path)))):
        make_config(work=work.replace("HERE", str(tmp_path)))


def test_corpora_share_a_place_and_not_their_work(
    make: Any, make_config: Any, expected: str, tmp_path: Path
) -> None:
    """Finish another corpus of the same texts between the stages of the first."""
    config = make("a")
    for stage in ("examples", "extract", "match"):
        prepare_stage(config, stage, **SMALL)
    other = make("b", row_length=64)
    plain = make_config(output=tmp_path / "plain-64", deduplicate=LEVELS, keep_text=True)
    plain = plain.model_copy(update={"row_length": 64})
    assert prepare(other, **SMALL).digest == prepare(plain, **SMALL).digest
    before = _records(tmp_path / "store")
    assert len(before) > 3
    for stage in ("extract", "match"):
        prepare_stage(config, stage, **SMALL)
    assert _records(tmp_path / "store") == before  # nothing was made again
    assert prepare(config, **SMALL).digest == expected


def test_many_tasks_of_a_machine_take_turns(tmp_path: Path) -> None:
    """Begin and end tasks in many threads: none fails, and nothing is left."""
    file = tmp_path / "store" / "one" / "x"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"data")
    record = file_record(file.parent, "x")
    needed = Needed("extract/000000", "one", record)
    stored = StoredStage(lambda task, folder: {}, Store(str(tmp_path / "store")), tmp_path, ())

    def work(number: int) -> None:
        with _scratch(stored.store.url, "match") as (scratch, common):
            stored._link(needed, common, scratch)
            assert (scratch / "extract/000000/x").read_bytes() == b"data"

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(200)))
    assert not [*(tmp_path / "temporary").rglob("scratch-*")]


def test_a_file_that_is_added_in_front_moves_numbers_only(
    make: Any, make_config: Any, tmp_path: Path
) -> None:
    config = make("a")
    prepare_stage(config, "extract", **SMALL)
    (tmp_path / "texts" / "-first.txt").write_text("a text before all others\n", encoding="utf-8")
    before = _records(tmp_path / "store")
    prepare(config, **SMALL)
    plain = make_config(output=tmp_path / "plain", deduplicate=LEVELS, keep_text=True)
    prepare(plain, **SMALL)
    numbers = [
        [
            (unit["stage"], unit["unit"], unit["identity"])
            for unit in map(json.loads, (folder / "provenance.jsonl").read_text().splitlines())
        ]
        for folder in (config.output, plain.output)
    ]
    assert before and numbers[0] == numbers[1]


def test_the_store_is_no_part_of_the_corpus(make: Any, expected: str, tmp_path: Path) -> None:
    manifest = prepare(make("a"), **SMALL)
    assert "store" not in json.dumps(manifest.model_dump(mode="json"))
    plain = make("a").model_copy(update={"work": None})
    assert prepare(plain, **SMALL).digest == manifest.digest == expected  # up to date


def test_who_finishes_leaves_what_another_works_with(
    make: Any, expected: str, tmp_path: Path
) -> None:
    """Let a process of this machine, or of another, be at work on the corpus."""
    config, said = make("a"), list[str]()
    store = Plan(config, **SMALL).shared
    (joined := store.joined()).__enter__()
    folder = Path(store.url)
    (mine,) = folder.glob("runs/*.json")
    other = json.loads(mine.read_text()) | {"pid": os.getppid(), "start": "1"}
    assert store.leave() == [] and not mine.exists()  # itself
    mine.write_text(json.dumps(other))
    assert store.leave() == [] and not mine.exists()  # dead: it has another start
    mine.write_text(json.dumps(other | {"host": "elsewhere"}))
    assert prepare(config, warn=said.append, **SMALL).digest == expected
    assert re.search(r"another run of this corpus \(host elsewhere, pid \d+\) is at work", said[0])
    assert len(_records(tmp_path / "store")) > 5
    joined.__exit__(None, None, None)
    assert prepare(make("b"), warn=said.append, **SMALL).digest == expected
    assert len(said) == 1 and not folder.exists()
