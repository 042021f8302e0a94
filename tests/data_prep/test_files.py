"""Test finding and reading files, local ones and those behind URLs."""

from __future__ import annotations

import bz2
import hashlib
import json
import os
import random
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from support.processes import ROOT, python
from support.reading import (
    COMPRESS,
    LIMITS,
    Quiet,
    documents,
    lines_of,
    read_all,
    served,
    wiki_page,
)

from data_prep import CorpusError
from data_prep.sources import Jsonl, Mediawiki, Parquet, Piece, Sentences, Text, files


def test_folders_files_and_globs(tmp_path: Path) -> None:
    for name in ("b.txt", "a/b.txt", "a/c.TXT", "a/.hidden.txt", ".git/d.txt", "e.pdf", "x[1].txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    os.mkfifo(tmp_path / "pipe.txt")  # opening it would wait for ever
    for path, ids in [
        ("", ["a/b.txt", "a/c.TXT", "b.txt", "x[1].txt"]),
        ("/", ["a/b.txt", "a/c.TXT", "b.txt", "x[1].txt"]),
        ("/*", ["b.txt", "e.pdf", "x[1].txt"]),
        ("/*/*.txt", ["a/b.txt"]),
        ("/**/b.txt", ["a/b.txt", "b.txt"]),
        ("/e.pdf", ["e.pdf"]),
        ("/x[1].txt", ["x[1].txt"]),
    ]:
        found = documents(read_all(Text(path=f"{tmp_path}{path}")))
        assert [item.id for item in found] == ids, path
    with pytest.raises(CorpusError, match=r"\.jsonl"):
        Jsonl(path=str(tmp_path)).inputs(1)
    with pytest.raises(CorpusError, match="no such file"):
        Text(path=str(tmp_path / "none")).inputs(1)
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nothing")
    for path in ("", "/*.txt"):
        with pytest.raises(CorpusError, match=r"gone\.txt: cannot be read: No such file"):
            Text(path=f"{tmp_path}{path}").inputs(1)


def test_file_names_of_any_bytes_give_different_ids(tmp_path: Path) -> None:
    for name in (b"a\xff.txt", b"a\xfe.txt"):
        Path(os.fsdecode(bytes(tmp_path) + b"/" + name)).write_text("text")
    ids = [item.id.encode() for item in documents(read_all(Text(path=str(tmp_path))))]
    assert len(set(ids)) == 2


def test_byte_ranges_cover_a_file(tmp_path: Path) -> None:
    for size in (0, 1, 6, 7, 8, 14, 50):
        for limit in (1, 7, 64):
            parts = files.byte_ranges(Piece("a", size=size), limit)
            assert parts[0].start == 0 and parts[-1].end is None
            assert [part.end for part in parts[:-1]] == [part.start for part in parts[1:]]
            assert [part.start for part in parts] == list(range(0, max(size, 1), limit))
            assert sum(part.size for part in parts) == size
    assert files.byte_ranges(Piece("a.gz", size=50), 7) == [Piece("a.gz", size=50)]


@pytest.mark.parametrize("seed", range(10))
def test_lines_of_ranges_are_the_lines_of_the_file(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    raw = b"".join(
        draw.choices([b"\n", b"\r\n", b"a", b"\xc3\xa9", b"\0", b"b" * 70], k=draw.randrange(40))
    )
    file = tmp_path / "f"
    file.write_bytes(raw)
    whole = [item for item in lines_of(raw) if item[0] < len(raw)]  # none after the last end
    borders = sorted(draw.choices(range(len(raw) + 1), k=4))
    for cut in ([0, *borders, None], *([*range(0, max(1, len(raw)), n), None] for n in LIMITS)):
        found = [x for a, b in pairwise(cut) for x in files.lines(str(file), a, b)]
        assert found == whole
        for start, end in pairwise(borders):
            after = [item for item in whole if item[0] >= start]
            expected = after if after and after[0][0] < end else []
            assert list(files.lines(str(file), start, end, on=True)) == expected


@pytest.mark.parametrize("suffix", COMPRESS)
def test_errors_name_truncated_and_damaged_files(tmp_path: Path, suffix: str) -> None:
    rows = "".join(json.dumps({"text": f"number {i * i}"}) + "\n" for i in range(5000)).encode()
    whole = COMPRESS[suffix](rows)
    file = tmp_path / f"t.txt{suffix}"
    source = Text(path=str(file), document="line")
    damaged_second = whole + b"BAD" + whole[3:]  # some take it for the end of the file
    for damaged in (whole[: len(whole) // 2], whole[:-3], b"nothing compressed", damaged_second):
        file.write_bytes(damaged)
        with pytest.raises(CorpusError, match=f"{file.name}: cut short or damaged"):
            read_all(source)
    file.write_bytes(whole + whole)
    assert len(read_all(source)) == 10_000


def test_hash_and_version_change_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    raw = bytes(range(256)) * 10_000
    file.write_bytes(raw)
    for start, end in ((0, None), (0, 1000), (999, 2_000_000), (2_000_000, None)):
        expected = hashlib.sha256(raw[start:end]).hexdigest()
        assert Piece(str(file), start, end).sha256() == expected
        assert Piece(f"file://{file}", start, end).sha256() == expected
    for path in (str(file), f"file://{file}"):
        os.utime(file)
        before = Piece(path).version()
        assert before == Piece(path).version()
        os.utime(file, (1, 1))
        assert before != Piece(path).version()


def write_here(path: str, data: bytes) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(data)


def fill(folder: str, write: Callable[[str, bytes], None], tmp_path: Path) -> None:
    """Write the same files of all kinds into a folder with `write`."""
    rows = b"".join(json.dumps({"text": f"row {i}"}).encode() + b"\n" for i in range(50))
    write(f"{folder}/a.jsonl", rows)
    write(f"{folder}/b/a.jsonl", rows)
    write(f"{folder}/b/c.jsonl.zst", zstandard.compress(rows))
    write(f"{folder}/b/.d.jsonl", rows)
    write(f"{folder}/t.txt", b"one\ntwo\n\nthree\n" * 20)
    pq.write_table(
        pa.table({"text": [f"t{i}" for i in range(90)]}), tmp_path / "p", row_group_size=9
    )
    write(f"{folder}/p.parquet", (tmp_path / "p").read_bytes())
    head = b"<mediawiki><siteinfo><base>https://x/y</base></siteinfo>"
    text = "".join(wiki_page(i, "w") for i in range(20)).encode()
    stored = bz2.compress(head)
    write(f"{folder}/w-multistream-index.txt.bz2", bz2.compress(b"%d:0:T\n" % len(stored)))
    dump = stored + bz2.compress(text) + bz2.compress(b"</mediawiki>")
    write(f"{folder}/w-multistream.xml.bz2", dump)


def sources_in(folder: str) -> Iterator[Any]:
    yield Jsonl(path=folder)
    yield Jsonl(path=f"{folder}/b/*.jsonl")
    yield Jsonl(path=f"{folder}/b/c.jsonl.zst")
    yield Text(path=f"{folder}/t.txt", document="paragraph")
    yield Sentences(path=folder)
    yield Parquet(path=folder)
    yield Mediawiki(path=folder)


@pytest.mark.parametrize("protocol", ["file", "memory"])
def test_remote_files_give_the_same_documents_as_local_ones(tmp_path: Path, protocol: str) -> None:
    local, root = tmp_path / "local", tmp_path / "remote"
    other = f"{protocol}://{root}"

    def write_there(path: str, data: bytes) -> None:
        with fsspec.open(path, "wb", auto_mkdir=True) as file:
            file.write(data)

    fill(str(local), write_here, tmp_path)
    fill(other, write_there, tmp_path)
    for here, there in zip(sources_in(str(local)), sources_in(other), strict=True):
        expected = read_all(here)
        for limit in (64, 1000, 10**9):
            assert read_all(there, limit) == expected
            mine, theirs = (
                [
                    (piece.start, piece.end, piece.size, piece.sha256())
                    for piece in source.inputs(limit)
                ]
                for source in (here, there)
            )
            assert mine == theirs
    before = Piece(f"{other}/t.txt").version()
    assert before == Piece(f"{other}/t.txt").version()
    write_there(f"{other}/t.txt", b"changed")
    assert before != Piece(f"{other}/t.txt").version() or before == ""  # memory:// tells nothing
    assert (before == "") == (protocol == "memory")
    for path, problem in (
        ("/none", "no such file"),
        ("/*.none", "no such"),
        ("/b", "no file named"),
    ):
        with pytest.raises(CorpusError, match=problem) as caught:
            Text(path=other + path).inputs(1)
        assert f"{protocol}://" in str(caught.value)


class Ranges(Quiet):
    """Serve ranges of files, as stores do."""

    def do_GET(self) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        path = Path(self.translate_path(self.path))
        if not asked or not path.is_file():
            super().do_GET()
            return
        data = path.read_bytes()
        part = data[int(asked[1]) : int(asked[2]) + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {asked[1]}-{asked[2]}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)


@pytest.mark.parametrize("handler", [Ranges, Quiet])
def test_files_are_read_over_http_with_and_without_ranges(tmp_path: Path, handler: Any) -> None:
    pytest.importorskip("aiohttp")
    fill(str(tmp_path), write_here, tmp_path)
    with served(partial(handler, directory=str(tmp_path))) as site:
        for name in ("a.jsonl", "b/c.jsonl.zst"):
            here = Jsonl(path=f"{tmp_path}/{name}")
            there = Jsonl(path=f"http://{site}/{name}?signature=secret")
            cuttable = handler is Ranges and not name.endswith("zst")
            assert (len(there.inputs(100)) > 1) == cuttable
            assert read_all(there, 100) == read_all(here)
        with pytest.raises(CorpusError) as caught:
            Jsonl(path=f"http://me:secret@{site}/none.jsonl?signature=secret").inputs(1)
        assert "none.jsonl" in str(caught.value) and "secret" not in str(caught.value)


def test_a_missing_driver_and_an_unknown_protocol_are_named() -> None:
    program = (
        "import sys\n"
        "sys.modules |= {'s3fs': None, 'gcsfs': None}\n"
        "from data_prep import CorpusError\n"
        "from data_prep.sources import Text\n"
        "for path in sys.argv[1:]:\n"
        "    try:\n"
        "        Text(path=path).inputs(1)\n"
        "    except CorpusError as error:\n"
        "        print(error)\n"
    )
    urls = ["s3://bucket/x", "gs://key:secret@bucket/x", "nonsense://x"]
    done = python("-c", program, *urls)
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.strip().split("\n")
    for line, url, package, name in ((first, "s3", "s3fs", "s3"), (second, "gs", "gcsfs", "gcs")):
        assert line == (
            f"{url}://bucket/x: needs the package {package}: install the extra {name}: "
            f"pip install '.[{name}]' in {ROOT}"  # its name on an index may be anyone's
        )
    assert third.startswith("nonsense://x: ") and "Protocol not known" in third
