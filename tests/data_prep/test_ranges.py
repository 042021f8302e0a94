"""Read remote inputs: how many bytes move, and what a store that fails now and then costs."""

from __future__ import annotations

import bz2
import json
import os
import random
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest
from pyarrow import parquet
from support.reading import served

from data_prep import CorpusError
from data_prep.config import CorpusConfig
from data_prep.pipeline.plan import Plan
from data_prep.prepare import finalise, prepare, prepare_stage
from data_prep.shards import load_manifest
from data_prep.sources import remote as ranges
from data_prep.sources.files import Piece, file_chunks, lines
from data_prep.sources.remote import BLOCK, Ranges

pytest.importorskip("aiohttp")


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges._kept.clear()
    monkeypatch.setattr(ranges, "PAUSES", (0.01, 0.01, 0.01))


def test_any_order_of_reads_gives_the_bytes() -> None:
    draw = random.Random(0)
    data = draw.randbytes(5 * BLOCK + 77)
    for state in ("", "etag"):
        asked: list[int] = []

        def fetch(first: int, last: int, asked: list[int] = asked) -> bytes:
            asked.append(last - first)
            return data[first:last]

        file = Ranges(fetch, state, len(data), 0, 0)
        for _ in range(200):
            place, size = draw.randrange(len(data) + 10), draw.randrange(2 * BLOCK)
            assert file.seek(place) == file.tell() == place
            assert file.read(size) == data[place : place + size]
        assert file.seek(-7, 2) == len(data) - 7 and file.read() == data[-7:]
        assert file.read(5) == b"" and file.seek(0) == 0 and file.read() == data
        ranges._kept.clear()
    # In order it asks for more and more, and for no more than lies before the end that it knows.
    asked = []
    file = Ranges(lambda a, b: asked.append(b - a) or data[a:b], "", len(data), 0, 3 * BLOCK)
    assert file.read(10) == data[:10] and asked == [3 * BLOCK]


class Server(BaseHTTPRequestHandler):
    """Serve one file with ranges; fail a share of the requests as busy servers do."""

    data, fails, changed = b"", 0.0, 0
    draw, sent, failed = random.Random(7), 0, 0

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        cls = type(self)
        if cls.draw.random() < cls.fails:
            cls.failed += 1
            self.send_error(503)
            return
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first = int(found[1]) if found else 0
        last = min(int(found[2]) + 1 if found and found[2] else len(cls.data), len(cls.data))
        self.send_response(206 if found else 200)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{cls.changed}"')
        self.send_header("Content-Length", str(last - first))
        if found:
            self.send_header("Content-Range", f"bytes {first}-{last - 1}/{len(cls.data)}")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(cls.data[first:last])
            cls.sent += last - first

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, type[Server]]]:
    handler = type("Handler", (Server,), {"draw": random.Random(7)})
    with served(handler) as address:
        yield f"http://{address}/texts.txt", handler


def texts(num: int) -> bytes:
    draw = random.Random(3)
    words = [f"word{i}" for i in range(3000)]
    return "\n".join(" ".join(draw.choices(words, k=60)) for _ in range(num)).encode()


def corpus(output: Path, path: str, kind: str = "text") -> CorpusConfig:
    more = {"document": "line"} if kind == "text" else {}
    values: dict[str, Any] = {
        "output": output,
        "tokenizer": {"train": {"vocab_size": 300}},
        "row_length": 64,
        "sources": [{"kind": kind, "path": path, **more}],
        "deduplicate": {"documents": "none"},
        "workers": 1,
    }
    return CorpusConfig.model_validate(values)


def test_a_server_that_fails_now_and_then_moves_each_byte_about_once(
    tmp_path: Path, server: tuple[str, type[Server]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "BLOCK", ranges.BLOCK // 2)
    url, handler = server
    # After a HEAD that fails fsspec asks for the whole file and closes it, which does not belong to
    # `sent` if the file is larger than the buffers of a connection.
    handler.data, handler.fails = texts(14_000), 0.1
    parts = {"piece_bytes": len(handler.data) // 3 + 1}
    (tmp_path / "texts.txt").write_bytes(handler.data)
    local = prepare(corpus(tmp_path / "local", str(tmp_path / "texts.txt")), **parts)
    assert prepare(corpus(tmp_path / "remote", url), **parts).digest == local.digest
    assert handler.failed > 0
    assert handler.sent < 1.2 * len(handler.data), handler.sent / len(handler.data)


def test_the_version_of_a_file_is_asked_for_once(
    tmp_path: Path, server: tuple[str, type[Server]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, handler = server
    handler.data = texts(1000)
    asked: list[str] = []
    monkeypatch.setattr(handler, "do_HEAD", lambda self: asked.append("HEAD") or self.do_GET())
    config = corpus(tmp_path / "remote", url)
    prepare_stage(config, "extract", piece_bytes=1 << 14)
    units = len(list((tmp_path / "remote" / ".work" / "extract").glob("*.json")))
    assert units > 20
    # Before and after a unit, and as few for the plan as for any other file.
    assert len(asked) < 2 * units + 5, (len(asked), units)
    asked.clear()
    for stage in ("deduplicate", "vocabulary", "pack"):
        prepare_stage(config, stage, piece_bytes=1 << 14)
    finalise(config, piece_bytes=1 << 14)
    prepare(config, piece_bytes=1 << 14)
    assert len(asked) < 30, asked


def test_what_is_missing_or_closed_is_said_at_once(
    tmp_path: Path, server: tuple[str, type[Server]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, handler = server
    monkeypatch.setattr(ranges, "PAUSES", (60.0,))
    for code in (403, 404):
        monkeypatch.setattr(handler, "do_GET", lambda self, code=code: self.send_error(code))
        with pytest.raises(CorpusError, match=r"texts\.txt"):
            prepare(corpus(tmp_path / str(code), url))


def test_missing_credentials_are_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3fs = pytest.importorskip("s3fs")
    monkeypatch.setattr(ranges, "PAUSES", (600.0,))  # longer than a test may take
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(CorpusError, match=r"s3://bucket/texts\.txt: .*credentials"):
        prepare(corpus(tmp_path / "shards", "s3://bucket/texts.txt"))
    s3fs.S3FileSystem.clear_instance_cache()


def test_a_file_that_changed_is_not_read_from_what_was_kept(
    server: tuple[str, type[Server]],
) -> None:
    url, handler = server
    handler.data = b"first\nlines\n"
    piece = Piece(url, 0, None, 12)
    before = piece.version(), piece.sha256()
    assert [line for _, line in lines(url)] == [b"first", b"lines"]
    handler.data, handler.changed = b"other\nlines\n", 1
    assert [line for _, line in lines(url)] == [b"other", b"lines"]
    assert piece.version() != before[0] and piece.sha256() != before[1]


def test_a_server_that_ignores_a_range_is_refused(
    server: tuple[str, type[Server]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, handler = server
    handler.data = random.Random(0).randbytes(3 * BLOCK)
    served = handler.do_GET

    def ignores(self: Any) -> None:
        if self.command == "GET" and self.headers.get("Range", "bytes=0-0") != "bytes=0-0":
            del self.headers["Range"]
        served(self)

    monkeypatch.setattr(handler, "do_GET", ignores)
    with pytest.raises(CorpusError, match=r"texts\.txt: cannot be read"):
        list(file_chunks(url, BLOCK, 2 * BLOCK))


class Folder(Server):
    """Serve a folder and one below it as web servers list them; `broken` fails in its way."""

    files: ClassVar[dict[str, bytes]] = {}
    broken, times, cuts = "", 0, 0

    def do_GET(self) -> None:
        cls = type(self)
        if cls.broken and self.path == cls.broken and cls.times:
            cls.times -= 1
            self.send_error(404 if cls.times > 5 else 503)
            return
        if self.path in cls.files:
            cls.data = cls.files[self.path]
            if cls.cuts and self.command == "GET" and len(cls.data) > 1000:
                cls.cuts -= 1
                cls.sent += len(cls.data)
                self.send_response(200)
                self.send_header("Content-Length", str(len(cls.data)))
                self.end_headers()
                self.wfile.write(cls.data[: len(cls.data) // 2])
                self.close_connection = True
                return
            super().do_GET()
            return
        names = {name.removeprefix(self.path) for name in cls.files if name.startswith(self.path)}
        names = {name.split("/")[0] + "/" * ("/" in name) for name in names}
        page = "".join(f'<a href="{name}">{name}</a>' for name in names).encode()
        self.send_response(200 if names else 404)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(page)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[tuple[str, type[Folder]]]:
    """Serve three files of one size, which the server gives one ETag."""
    size = len(texts(100))
    files = {"/in/a.txt": texts(100), "/in/c.txt": texts(100)[::-1]}
    files["/in/sub/b.txt"] = texts(200)[size : 2 * size]
    for name, data in files.items():
        (path := tmp_path / "disk" / name[4:]).parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    handler = type("Handler", (Folder,), {"draw": random.Random(7), "files": files})
    with served(handler) as address:
        yield f"http://{address}/in/", handler


@pytest.mark.parametrize("path", ["", "**/*.txt"])
def test_files_of_one_size_and_state_are_told_apart(
    tmp_path: Path, folder: tuple[str, type[Folder]], path: str
) -> None:
    url, _ = folder
    expected = prepare(corpus(tmp_path / "local", str(tmp_path / "disk")))
    assert prepare(corpus(tmp_path / "remote", url + path)).digest == expected.digest


def test_a_folder_that_fails_once_is_listed_again_and_one_that_is_missing_refused(
    tmp_path: Path, folder: tuple[str, type[Folder]]
) -> None:
    url, handler = folder
    expected = prepare(corpus(tmp_path / "local", str(tmp_path / "disk")))
    for broken in ("/in/", "/in/sub/"):
        handler.broken, handler.times = broken, 2
        remote = corpus(tmp_path / broken.replace("/", "-"), url)
        assert prepare(remote).digest == expected.digest
    handler.times = 1000
    with pytest.raises(CorpusError, match=r"/in/: cannot be read .*sub"):
        prepare(corpus(tmp_path / "refused", url))


def test_a_body_that_is_cut_is_asked_for_again(
    tmp_path: Path, folder: tuple[str, type[Folder]]
) -> None:
    url, handler = folder
    expected = prepare(corpus(tmp_path / "local", str(tmp_path / "disk")))
    handler.cuts = 2
    assert prepare(corpus(tmp_path / "remote", url)).digest == expected.digest
    assert handler.cuts == 0


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, counted]]:
    """Serve a bucket through a proxy that counts."""
    pytest.importorskip("moto.server")
    import boto3
    import s3fs
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        _, port = server.get_host_and_port()
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "test")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        bucket = boto3.resource("s3").Bucket("bucket")
        bucket.create()
        with counted(port) as proxy:
            monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
            s3fs.S3FileSystem.clear_instance_cache()
            yield bucket, proxy
    finally:
        server.stop()


def test_s3_moves_each_byte_about_once(
    tmp_path: Path, s3: tuple[Any, counted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "BLOCK", ranges.BLOCK // 8)
    bucket, proxy = s3
    data = texts(3_500)
    bucket.put_object(Key="texts/a.txt", Body=data)
    parts = {"piece_bytes": len(data) // 3 + 1}
    manifest = prepare(corpus(tmp_path / "remote", "s3://bucket/texts/"), **parts)
    (tmp_path / "a.txt").write_bytes(data)
    local = prepare(corpus(tmp_path / "local", str(tmp_path / "a.txt")), **parts)
    assert load_manifest(tmp_path / "remote").digest == manifest.digest == local.digest
    assert proxy.moved < 1.2 * len(data), proxy.moved / len(data)


def test_of_a_table_on_s3_the_columns_that_are_read_move_once(
    tmp_path: Path, s3: tuple[Any, counted], monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, proxy = s3
    monkeypatch.setattr(ranges, "BLOCK", 1 << 11)  # a row group has more than are kept
    rows = texts(4_500).decode().split("\n")
    other = [random.Random(n).randbytes(800).hex() for n in range(len(rows))]
    table = pa.table({"before": other, "text": rows, "after": other})
    file = tmp_path / "a.parquet"
    parquet.write_table(table, file, row_group_size=3_000, use_dictionary=False)
    bucket.upload_file(str(file), "a.parquet")
    groups = parquet.read_metadata(file)
    used = sum(groups.row_group(n).column(1).total_compressed_size for n in range(2))
    assert used / 2 > ranges.KEPT * ranges.BLOCK
    assert prepare(corpus(tmp_path / "remote", "s3://bucket/a.parquet", "parquet")).digest == (
        prepare(corpus(tmp_path / "local", str(file), "parquet")).digest
    )
    assert proxy.moved < 1.2 * used, proxy.moved / used


def test_a_dump_on_s3_is_planned_once(
    tmp_path: Path, s3: tuple[Any, counted], monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, proxy = s3
    monkeypatch.setattr(ranges, "BLOCK", 1 << 12)
    _, stored = dump_of(tmp_path, bucket)
    config = corpus(tmp_path / "remote", "s3://bucket/", "mediawiki")
    sizes = {"piece_bytes": 1 << 16}
    for task in (1, 2):  # as of an array
        prepare_stage(config, "extract", task, 2, **sizes)
    assert proxy.moved < 1.2 * stored, proxy.moved / stored
    for stage in ("deduplicate", "vocabulary", "pack"):
        before = proxy.moved
        assert prepare_stage(config, stage, **sizes) > 0
        assert proxy.moved - before < 0.05 * stored, (proxy.moved - before) / stored
    local = prepare(corpus(tmp_path / "local", str(tmp_path / "dump"), "mediawiki"), **sizes)
    assert finalise(config, **sizes).digest == local.digest


def test_where_a_dump_was_cut_is_forgotten_when_it_changes(
    tmp_path: Path, s3: tuple[Any, counted]
) -> None:
    bucket, _ = s3
    config = corpus(tmp_path / "remote", "s3://bucket/", "mediawiki")
    before = {}
    for num in (400, 300):
        dump_of(tmp_path, bucket, num)
        prepare_stage(config, "extract", piece_bytes=1 << 15)
        plan = Plan(config, piece_bytes=1 << 15)
        found = [(piece.start, piece.end) for _, _, piece in plan.pieces[0]]
        (source,) = config.sources
        assert found == [(piece.start, piece.end) for piece in source.inputs(1 << 15)]
        before[num] = found
        kept = json.loads((plan.work / "cuts.json").read_bytes())
        (key, *_) = kept["cuts"]
        kept["cuts"][key] = [(0, None, 5)]  # by hand, without its seal
        (plan.work / "cuts.json").write_text(json.dumps(kept), encoding="utf-8")
    assert before[400] != before[300]
    # An index that is added makes another cut than a scan, or none, has made.
    folder = tmp_path / "dump"
    (index,) = folder.glob("*.txt.bz2")
    listed = index.read_bytes()
    index.unlink()
    local = corpus(tmp_path / "local", str(folder), "mediawiki")
    starts = []
    for data in (None, listed, None):
        index.unlink(missing_ok=True)
        if data is not None:
            index.write_bytes(data)
        prepare_stage(local, "examples", piece_bytes=1)
        starts.append([piece.start for _, _, piece in Plan(local, piece_bytes=1).pieces[0]])
        assert starts[-1] == [piece.start for piece in local.sources[0].inputs(1)]
    assert starts[0] == starts[2] != starts[1]


def dump_of(folder: Path, bucket: Any, num: int = 400) -> tuple[Path, int]:
    """Write a multistream dump and its index to a folder and a bucket; return its bytes, too."""
    draw = random.Random(5)
    words = [f"word{i}" for i in range(3000)]
    head, *pages = (
        f"<page><title>Page {n}</title><ns>0</ns><id>{n}</id><revision><text>"
        f"{' '.join(draw.choices(words, k=250))}</text></revision></page>\n"
        for n in range(num + 1)
    )
    streams = [b"<mediawiki>\n" + head.encode()]
    streams += ["".join(pages[n : n + 10]).encode() for n in range(0, num, 10)]
    stored, index = b"", ""
    for n, stream in enumerate(streams):
        index += f"{len(stored)}:{n}:Page\n" * (n > 0)
        stored += bz2.compress(stream)
    stored += bz2.compress(b"</mediawiki>\n")
    (folder / "dump").mkdir(exist_ok=True)
    for name, data in (("", stored), ("-index", bz2.compress(index.encode()))):
        kind = "txt" if name else "xml"
        file = f"xwiki-pages-articles-multistream{name}.{kind}.bz2"
        (folder / "dump" / file).write_bytes(data)
        bucket.put_object(Key=file, Body=data)
    return folder / "dump", len(stored)


class counted:
    """Pass connections on to a port, and count what comes back."""

    def __init__(self, target: int) -> None:
        self.target, self.moved = target, 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]

    def __enter__(self) -> counted:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *ended: object) -> None:
        self.listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self.target))
            for source, sink, counts in ((near, far, False), (far, near, True)):
                threading.Thread(
                    target=self._pump, args=(source, sink, counts), daemon=True
                ).start()

    def _pump(self, source: socket.socket, sink: socket.socket, counts: bool) -> None:
        with suppress(OSError):  # either end may close first
            while data := source.recv(1 << 16):
                self.moved += len(data) * counts
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
