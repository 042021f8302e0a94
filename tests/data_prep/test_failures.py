"""Check that what fails is set aside and named, that the rest is made, and that a run continues."""

from __future__ import annotations

import bz2
import json
import multiprocessing.process
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from pyarrow import parquet

from data_prep import CorpusError
from data_prep.config import CorpusConfig
from data_prep.pipeline.watchdog import FILE
from data_prep.prepare import finalise, prepare, prepare_stage
from data_prep.shards import load_manifest

WORDS = [f"word{number}" for number in range(900)]
SLOW = "\U0001f600/ID7"


def line(number: int, size: int = 40) -> dict[str, str]:
    """Return a record; its id has a character beyond 16 bits, and a slash."""
    text = " ".join(WORDS[(number * 31 + place * 7) % len(WORDS)] for place in range(size))
    return {"id": f"\U0001f600/ID{number}", "text": f"Document {number}. {text}."}


def write(folder: Path, name: str, records: list[dict[str, str]]) -> Path:
    folder.mkdir(exist_ok=True)
    data = "".join(json.dumps(record) + "\n" for record in records).encode()
    (folder / name).write_bytes(bz2.compress(data))
    return folder / name


def corpus(output: Path, path: Path, **changes: Any) -> CorpusConfig:
    values: dict[str, Any] = {
        "output": output,
        "tokenizer": {"train": {"vocab_size": 400}},
        "row_length": 64,
        "sources": [{"kind": "jsonl", "path": str(path), "id_field": "id"}],
        "deduplicate": {"documents": "none"},
        "workers": 2,
    }
    return CorpusConfig.model_validate(values | changes)


def made(output: Path) -> dict[str, int]:
    """Return when each unit of extraction was written."""
    return {file.name: file.stat().st_mtime_ns for file in output.glob(".work/extract/*.json")}


CHILDREN: set[Any] = multiprocessing.process._children  # type: ignore[attr-defined]


def files(folder: Path, num: int = 6, size: int = 40) -> list[Path]:
    """Write files of a few documents, each a unit."""
    per_file = [[line(10 * n + place, size) for place in range(10)] for n in range(num)]
    return [write(folder, f"{n}.jsonl.bz2", records) for n, records in enumerate(per_file)]


def test_two_broken_files_are_named_and_the_same_command_makes_them_alone(tmp_path: Path) -> None:
    texts = files(tmp_path / "texts")
    whole = [file.read_bytes() for file in texts]
    expected = prepare(corpus(tmp_path / "whole", tmp_path / "texts"), piece_bytes=1).digest
    for broken in (1, 4):
        texts[broken].write_bytes(whole[broken][: len(whole[broken]) // 2])
    output, told = tmp_path / "shards", list[str]()
    config = corpus(output, tmp_path / "texts")
    with pytest.raises(CorpusError, match=r"2 of 6 units of stage extract failed") as error:
        prepare(config, warn=told.append, piece_bytes=1)
    assert "\n" not in str(error.value)
    assert [text.split(": ")[0] for text in told] == [str(texts[1]), str(texts[4])]
    assert not (output / "manifest.json").exists()
    before = made(output)
    assert sorted(before) == [f"{n:06d}.json" for n in (0, 2, 3, 5)]
    for broken in (1, 4):
        texts[broken].write_bytes(whole[broken])
    assert prepare(config, piece_bytes=1).digest == expected


def test_one_broken_file_is_said_in_one_line(tmp_path: Path) -> None:
    texts = files(tmp_path / "texts", 3)
    texts[1].write_bytes(texts[1].read_bytes()[:50])
    told: list[str] = []
    with pytest.raises(CorpusError, match=r"1\.jsonl\.bz2: cut short") as error:
        prepare(corpus(tmp_path / "shards", tmp_path / "texts"), warn=told.append, piece_bytes=1)
    assert "\n" not in str(error.value) and not told
    assert len(made(tmp_path / "shards")) == 2


@contextmanager
def killer(home: Path, document: str, times: int) -> Iterator[list[str]]:
    """Kill a worker, again and again, as soon as it reads a document."""
    killed: list[str] = []
    over = threading.Event()

    def noted(file: Path) -> str:
        return file.read_bytes().split(b"\0")[0].decode()

    def watch() -> None:
        readers: dict[Path, psutil.Process] = {}  # found before they read it: that takes a while
        while not over.is_set() and len(killed) < times:
            with suppress(OSError, psutil.Error):  # folders come and go
                for file in home.rglob(FILE):
                    if file not in readers:
                        # psutil does not find them: a server forks workers, not this process.
                        for child in [*CHILDREN]:
                            process = psutil.Process(child.pid)
                            if str(file) in [opened.path for opened in process.open_files()]:
                                readers[file] = process
                    if not noted(file).endswith(document) or file not in readers:
                        continue
                    process = readers.pop(file)
                    process.suspend()
                    while process.status() != psutil.STATUS_STOPPED:
                        time.sleep(0.001)
                    if not noted(file).endswith(document):  # it was read meanwhile
                        process.resume()
                        continue
                    killed.append(noted(file))
                    process.kill()
                    while process.status() != psutil.STATUS_ZOMBIE:
                        time.sleep(0.001)
            time.sleep(0.005)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()


def slow_files(folder: Path) -> None:
    """Write files, of which a document takes seconds: its language is looked for in megabytes."""
    files(folder)
    slow = [line(n) for n in range(10)]
    slow[7] = line(7, size=600_000)
    write(folder, "0.jsonl.bz2", slow)


# An entry without a place is matched by its id, which test_each_kind_leaves_a_document_out covers.
@pytest.mark.parametrize(
    "entry",
    ["0:0.jsonl.bz2@0/\U0001f600/ID7", pytest.param("\U0001f600/ID7", marks=pytest.mark.slow)],
)
def test_a_document_that_ends_two_workers_is_named_and_left_out(tmp_path: Path, entry: str) -> None:
    slow_files(tmp_path / "texts")
    output = tmp_path / "shards"
    english = [{"kind": "jsonl", "path": str(tmp_path / "texts"), "id_field": "id"}]
    config = corpus(output, tmp_path / "texts", sources=english)
    with (
        killer(output, f"/{SLOW}", 2) as killed,
        pytest.raises(CorpusError, match=r"its worker died twice .* while it read") as error,
    ):
        prepare(config, piece_bytes=1)
    assert killed == ["0:0.jsonl.bz2@0/\U0001f600/ID7"] * 2
    assert "(0:0.jsonl.bz2@0)" in str(error.value) and "\n" not in str(error.value)
    advice = 'leave it out with `skip_documents: ["0:0.jsonl.bz2@0/\U0001f600/ID7"]`'
    assert advice in str(error.value)
    before = made(output)
    assert len(before) == 5 and not (output / "manifest.json").exists()

    config = corpus(output, tmp_path / "texts", sources=english, skip_documents=[entry])
    prepare_stage(config, "extract", piece_bytes=1)
    same = [name for name, when in made(output).items() if before.get(name) == when]
    # With its place it is looked for in one unit; without, all are made again.
    assert len(same) == (5 if "@" in entry else 0)
    manifest = prepare(config, piece_bytes=1)
    assert manifest.content["skip_documents"] == [entry]
    log = (output / "quarantine.jsonl").read_text(encoding="utf-8")
    assert [json.loads(each)["reason"] for each in log.splitlines()] == ["skip_documents"]
    # It is as if it had never been there.
    write(tmp_path / "texts", "0.jsonl.bz2", [line(n) for n in range(10) if n != 7])
    without = prepare(corpus(tmp_path / "without", tmp_path / "texts"), piece_bytes=1)
    for split, found in without.splits.items():
        assert [shard.sha256 for shard in found.shards] == [
            shard.sha256 for shard in manifest.splits[split].shards
        ]
    with pytest.raises(CorpusError, match="skip_documents"):
        prepare(corpus(output, tmp_path / "texts", sources=english), piece_bytes=1)


def test_a_worker_that_is_killed_once_changes_nothing(tmp_path: Path) -> None:
    slow_files(tmp_path / "texts")
    expected = prepare(corpus(tmp_path / "whole", tmp_path / "texts"), piece_bytes=1).digest
    with killer(tmp_path / "shards", f"/{SLOW}", 1) as killed:
        found = prepare(corpus(tmp_path / "shards", tmp_path / "texts"), piece_bytes=1)
    assert found.digest == expected and len(killed) == 1


@pytest.mark.parametrize("damage", ["footer", "column"])
def test_a_table_whose_footer_is_wrong_is_set_aside(tmp_path: Path, damage: str) -> None:
    (tmp_path / "texts").mkdir()
    paths = [tmp_path / "texts" / f"{n}.parquet" for n in range(4)]
    for n, path in enumerate(paths):
        parquet.write_table(pa.Table.from_pylist([line(10 * n + i) for i in range(10)]), path)
    source = {"kind": "parquet", "path": str(tmp_path / "texts"), "id_field": "id"}
    expected = prepare(corpus(tmp_path / "whole", tmp_path, sources=[source])).digest
    whole = paths[2].read_bytes()
    if damage == "footer":
        paths[2].write_bytes(whole[:-5])
    else:
        parquet.write_table(pa.table({"body": ["x"]}), paths[2])
    config = corpus(tmp_path / "shards", tmp_path, sources=[source])
    message = r"2\.parquet: (unreadable|no column 'text'; it has body)"
    with pytest.raises(CorpusError, match=message):
        prepare(config, piece_bytes=1)
    before = made(tmp_path / "shards")
    assert len(before) == 3
    paths[2].write_bytes(whole)
    assert prepare(config, piece_bytes=1).digest == expected
    after = {**made(tmp_path / "shards")}
    assert not after or all(after[name] == moment for name, moment in before.items())
    # A key that is wrong in every file is refused before anything is read.
    config = corpus(tmp_path / "wrong", tmp_path, sources=[source | {"text_field": "body"}])
    with pytest.raises(CorpusError, match=r"0\.parquet: no column 'body'; it has id, text"):
        prepare(config)
    assert not (tmp_path / "wrong").exists()


def test_an_entry_that_names_nothing_is_told(tmp_path: Path) -> None:
    files(tmp_path / "texts", 2)
    told: list[str] = []
    config = corpus(tmp_path / "shards", tmp_path / "texts", skip_documents=[line(3)["id"], "none"])
    # Their order does not matter.
    assert config == corpus(
        tmp_path / "shards", tmp_path / "texts", skip_documents=["none", line(3)["id"], "none"]
    )
    for stage in ("extract", "deduplicate", "vocabulary", "pack"):
        prepare_stage(config, stage, piece_bytes=1)
    finalise(config, told.append, piece_bytes=1)
    assert [text for text in told if "skip_documents" in text] == [
        "skip_documents: no document is called 'none': compare the ids"
    ]
    assert load_manifest(tmp_path / "shards").content["skip_documents"] == ["none", line(3)["id"]]


@pytest.mark.parametrize(
    ("kind", "name", "text", "ids"),
    [
        (
            "mediawiki",
            "a.xml",
            "<mediawiki>{}</mediawiki>\n".format(
                "".join(
                    f"<page><title>T{n}</title><ns>0</ns><id>{n}</id><revision><text>"
                    f"{line(n)['text']}</text></revision></page>\n"
                    for n in range(3)
                )
            ),
            ["1"],
        ),
        (
            "wikiextractor",
            "wiki_00",
            "".join(json.dumps(line(n) | {"title": "T", "url": "u"}) + "\n" for n in range(3)),
            [line(1)["id"]],
        ),
        ("text", "a.txt", "\n".join(line(n)["text"] for n in range(3)), None),
        ("books", "a.txt", line(1)["text"], ["a.txt"]),
    ],
)
def test_each_kind_leaves_a_document_out(
    tmp_path: Path, kind: str, name: str, text: str, ids: list[str] | None
) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / name).write_text(text, encoding="utf-8")
    (tmp_path / "texts" / f"more-{name}").write_text(text.replace("Doc", "doc"), encoding="utf-8")
    if ids is None:
        ids = [f"a.txt@{len(line(0)['text']) + 1}"]
    source: dict[str, Any] = {"kind": kind, "path": str(tmp_path / "texts")}
    if kind == "text":
        source["document"] = "line"
    config = corpus(tmp_path / "shards", tmp_path, sources=[source], skip_documents=ids, workers=1)
    manifest = prepare(config)
    (counted,) = manifest.sources
    num = 2 if kind == "mediawiki" else 1  # in both files
    assert counted.dropped["skip_documents"] == num, counted
