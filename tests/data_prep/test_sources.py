"""Readers: files written here, read back, and compared with what was put in."""

from __future__ import annotations

import bz2
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from pydantic import TypeAdapter, ValidationError

from data_prep import CorpusError
from data_prep.sources import (
    Document,
    HuggingFace,
    Jsonl,
    Parquet,
    PythonDocs,
    Rejected,
    Sentences,
    Source,
    Text,
    inputs,
    read,
)
from data_prep.sources.text import PIECE

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".zst": zstandard.compress,
}


def read_all(source: Any) -> list[Document | Rejected]:
    return [item for file in inputs(source) for item in read(source, file)]


def reasons(items: list[Document | Rejected]) -> list[tuple[str, str]]:
    return [(item.where, item.reason) for item in items if isinstance(item, Rejected)]


def test_source_entries() -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(Source)
    assert adapter.validate_python({"kind": "jsonl", "path": "a/b.jsonl"}).label == "b.jsonl"
    for wrong in (
        {"kind": "jsonl", "path": "x", "fraction": 0},
        {"kind": "text", "path": "x", "txt": 1},
        {"kind": "tex", "path": "x"},
        {"kind": "books"},
    ):
        with pytest.raises(ValidationError):
            adapter.validate_python(wrong)


def test_folders_files_and_globs(tmp_path: Path) -> None:
    for name in ("b.txt", "a/c.TXT", "a/.hidden.txt", ".git/d.txt", "e.pdf"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [item.id for item in read_all(Text(path=str(tmp_path)))] == ["a/c.TXT", "b.txt"]  # type: ignore[union-attr]
    assert [item.id for item in read_all(Text(path=f"{tmp_path}/*"))] == ["b.txt", "e.pdf"]  # type: ignore[union-attr]
    assert [item.id for item in read_all(Text(path=f"{tmp_path}/e.pdf"))] == ["e.pdf"]  # type: ignore[union-attr]
    with pytest.raises(CorpusError, match=r"\.jsonl"):
        inputs(Jsonl(path=str(tmp_path)))
    with pytest.raises(CorpusError, match="no such file"):
        inputs(Text(path=str(tmp_path / "none")))


@pytest.mark.parametrize("suffix", COMPRESS)
def test_text_of_all_kinds(tmp_path: Path, suffix: str) -> None:
    raw = "one\u2028still one\r\n\r\ntwo\nthree\n\n\nfour".encode()
    file = tmp_path / f"t.txt{suffix}"
    file.write_bytes(COMPRESS[suffix](raw))
    name = file.name
    assert read_all(Text(path=str(file))) == [Document(raw.decode(), name)]
    assert read_all(Text(path=str(file), document="line")) == [
        Document("one\u2028still one", f"{name}#1"),
        Document("two", f"{name}#3"),
        Document("three", f"{name}#4"),
        Document("four", f"{name}#7"),
    ]
    assert read_all(Text(path=str(file), document="paragraph")) == [
        Document("one\u2028still one", f"{name}#1"),
        Document("two\nthree", f"{name}#3"),
        Document("four", f"{name}#7"),
    ]
    assert read_all(Sentences(path=str(file))) == read_all(
        Text(path=str(file), document="paragraph")
    )


def test_bad_bytes_reject_their_document_only(tmp_path: Path) -> None:
    file = tmp_path / "t.txt"
    file.write_bytes(b"good\nb\xffd\nn\0l\nlast\n\n\n")
    assert reasons(read_all(Text(path=str(file)))) == [("t.txt", "binary")]
    bad = [("t.txt#2", "not utf-8"), ("t.txt#3", "binary")]
    items = read_all(Text(path=str(file), document="line"))
    assert reasons(items) == bad
    assert [item.text for item in items if isinstance(item, Document)] == ["good", "last"]
    items = read_all(Sentences(path=str(file)))
    assert reasons(items) == bad
    assert items[-1] == Document("good\nlast", "t.txt#1")
    # The bad byte lies far behind the first piece: still nothing of the file comes out.
    file.write_bytes(b"word " * (PIECE // 4) + b"\xff")
    assert reasons(read_all(Text(path=str(file)))) == [("t.txt", "not utf-8")]
    file.write_bytes(b"")
    assert reasons(read_all(Text(path=str(file)))) == [("t.txt", "empty")]


def test_long_documents_are_cut_and_nothing_is_lost(tmp_path: Path) -> None:
    file = tmp_path / "t.txt.gz"
    text = "caf\u00e9 " * (PIECE // 2)
    file.write_bytes(gzip.compress(text.encode(), 1))
    items = read_all(Text(path=str(file)))
    assert all(isinstance(item, Document) for item in items) and len(items) == 3
    assert "".join(item.text for item in items if isinstance(item, Document)) == text
    assert [item.id for item in items if isinstance(item, Document)] == [
        "t.txt.gz", "t.txt.gz#1", "t.txt.gz#2",
    ]  # fmt: skip
    (tmp_path / "s.txt").write_text("a\n" * 2500)
    runs = [
        d.text for d in read_all(Sentences(path=f"{tmp_path}/s.txt")) if isinstance(d, Document)
    ]
    assert [run.count("\n") + 1 for run in runs] == [1000, 1000, 500]


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".zst"])
def test_cut_files_are_named(tmp_path: Path, suffix: str) -> None:
    lines = "".join(json.dumps({"text": f"number {i * i}"}) + "\n" for i in range(5000)).encode()
    whole = COMPRESS[suffix](lines)
    name = f"t.txt{suffix}"
    for damaged in (whole[: len(whole) // 2], whole[:-3], b"nothing compressed"):
        (tmp_path / name).write_bytes(damaged)
        source = Text(path=str(tmp_path / name), document="line")
        with pytest.raises(CorpusError, match=f"{name}: cut short or damaged"):
            read_all(source)


def test_jsonl(tmp_path: Path) -> None:
    records = [
        b'{"text": "one", "id": 7, "t": "T"}',
        b"{bad",
        b'{"txt": "x"}',
        b'{"text": 5}',
        b'{"text": "\\ud800"}',
        b'["text"]',
        '{"text": "a\u2028b\u0085c", "id": null}'.encode(),
        b'{"text": "\xff"}',
        b"",
        b'{"text": " "}',
        b"[" * 100_000,
        b'{"text": "last"}',
    ]
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(b"\n".join(records)))
    items = read_all(Jsonl(path=str(tmp_path), id_field="id", title_field="t"))
    assert [item for item in items if isinstance(item, Document)] == [
        Document("one", "7", "T"),
        Document("a\u2028b\u0085c", "a.jsonl.zst#7"),
        Document("last", "a.jsonl.zst#12"),
    ]
    assert reasons(items) == [
        ("a.jsonl.zst#2", "malformed json"),
        ("a.jsonl.zst#3", "no text"),
        ("a.jsonl.zst#4", "no text"),
        ("a.jsonl.zst#5", "lone surrogate"),
        ("a.jsonl.zst#6", "malformed json"),
        ("a.jsonl.zst#8", "not utf-8"),
        ("a.jsonl.zst#10", "empty"),
        ("a.jsonl.zst#11", "malformed json"),
    ]


def test_parquet(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    texts = [f"text {i}" for i in range(1000)]
    pq.write_table(pa.table({"text": [*texts, None], "n": range(1001)}), file, row_group_size=300)
    items = read_all(Parquet(path=str(tmp_path), id_field="n"))
    assert items[:-1] == [Document(text, str(i)) for i, text in enumerate(texts)]
    assert reasons(items) == [("a.parquet#1001", "no text")]
    with pytest.raises(CorpusError, match="no column 'body'; it has text, n"):
        read_all(Parquet(path=str(file), text_field="body"))
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CorpusError, match=r"a\.parquet: unreadable"):
        read_all(Parquet(path=str(file)))


def test_huggingface_saved_and_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    texts = {"text": ["one", "two", ""]}
    expected = ["one", "two"]
    datasets.Dataset.from_dict(texts).save_to_disk(tmp_path / "saved")
    datasets.DatasetDict(train=datasets.Dataset.from_dict(texts)).save_to_disk(tmp_path / "dict")
    (tmp_path / "folder").mkdir()
    pq.write_table(pa.table(texts), tmp_path / "folder/train.parquet")
    for name in ("saved", "dict", "folder"):
        source = HuggingFace(path=str(tmp_path / name))
        assert inputs(source) == [source.path]
        items = read_all(source)
        assert [d.text for d in items if isinstance(d, Document)] == expected
        assert [d.id for d in items if isinstance(d, Document)] == [f"{name}#1", f"{name}#2"]
        assert reasons(items) == [(f"{name}#3", "empty")]
        with pytest.raises(CorpusError, match="no field 'body'"):
            read_all(HuggingFace(path=source.path, text_field="body"))
    for wrong in ({"path": str(tmp_path / "none")}, {"path": source.path, "split": "dev"}):
        with pytest.raises(CorpusError, match="cannot load") as caught:
            read_all(HuggingFace(**wrong))
        assert "\n" not in str(caught.value)


def test_python_docs() -> None:
    source = PythonDocs(packages=("python", "pydantic", "no_such_package"), max_megabytes=0.2)
    assert inputs(source) == ["pydantic", "python"]
    items = list(read(source, "python"))
    documents = [item for item in items if isinstance(item, Document)]
    assert documents == list(read(source, "python"))
    assert 50_000 < sum(len(item.text) for item in documents) <= 200_000
    assert len({item.id for item in documents}) == len(documents)
    assert not any(">>>" in item.text for item in documents)
    argparse = next(item for item in documents if item.title == "python.argparse")
    assert "optparse-inspired command-line" in argparse.text
    with pytest.raises(CorpusError, match="none of no_such_package"):
        inputs(PythonDocs(packages=("no_such_package",)))
