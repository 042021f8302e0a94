"""Test records: JSON lines, Parquet and datasets, whole and in pieces."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from support.reading import LIMITS, documents, lines_of, read_all, reasons

from data_prep import CorpusError
from data_prep.config import CorpusConfig
from data_prep.estimate import estimate
from data_prep.prepare import prepare
from data_prep.sources import Csv, Document, HuggingFace, Jsonl, Parquet, Text, Tsv, row_groups
from data_prep.text.wikipedia import repaired


def test_jsonl(tmp_path: Path) -> None:
    records = [
        (b'{"text": "one", "id": 7, "t": "T"}', ""),
        (b"{bad", "malformed json"),
        (b'{"txt": "x"}', "no text"),
        (b'{"text": 5}', "no text"),
        (b'{"text": "\\ud800"}', "lone surrogate"),
        (b'["text"]', "malformed json"),
        ('{"text": "a\u2028b\u0085c", "id": null}'.encode(), ""),
        (b'{"text": "\xff"}', "not utf-8"),
        (b"", ""),
        (b'{"text": " "}', "empty"),
        (b"[" * 100_000, "malformed json"),
        (b'{"text": "x", "id": "' + b"9" * 20_000 + b'"}', "too long"),
        (b'{"text": "nul \\u0000 and \0"}', "malformed json"),
        (b'{"text": "last"}', ""),
    ]
    raw = b"\n".join(record for record, _ in records)
    (tmp_path / "a.jsonl").write_bytes(raw)
    (tmp_path / "z.jsonl.zst").write_bytes(zstandard.compress(raw))
    at = [offset for offset, _ in lines_of(raw)]
    for name, limits in (("a.jsonl", (64, 1000, 10**9)), ("z.jsonl.zst", (1,))):
        source = Jsonl(path=f"{tmp_path}/{name}", id_field="id", title_field="t")
        for limit in limits:
            items = read_all(source, limit)
            assert documents(items) == [
                Document("one", "7", "T"),
                Document("a\u2028b\u0085c", f"{name}@{at[6]}"),
                Document("last", f"{name}@{at[13]}"),
            ]
            assert reasons(items) == [
                (f"{name}@{offset}", reason)
                for offset, (_, reason) in zip(at, records, strict=True)
                if reason
            ]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_jsonl_is_the_same_from_pieces_of_any_size(tmp_path: Path, end: str) -> None:
    draw = random.Random(2)
    texts = ["caf\u00e9 \u2028 " * draw.randrange(1, 9) for _ in range(40)]
    rows = [json.dumps({"text": text}, ensure_ascii=draw.random() < 0.5) for text in texts]
    raw = end.join(rows).encode()
    (tmp_path / "a.jsonl").write_bytes(raw)
    offsets = [offset for offset, _ in lines_of(raw)]
    expected = [Document(t, f"a.jsonl@{at}") for t, at in zip(texts, offsets, strict=True)]
    for limit in (*LIMITS, *range(100, 140), len(raw), len(raw) - 1):
        assert read_all(Jsonl(path=str(tmp_path)), limit) == expected


def test_cleaning_wikipedia_repairs_text_of_other_tools(tmp_path: Path) -> None:
    text = "He ( , ) was born . {{citation}} [[Town|town]]s &amp; more"
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
    pq.write_table(pa.table({"text": [text]}), tmp_path / "a.parquet")
    for kind in (Jsonl, Parquet):
        assert documents(read_all(kind(path=str(tmp_path))))[0].text == text
        mended = documents(read_all(kind(path=str(tmp_path), cleaning="wikipedia")))[0].text
        assert mended == repaired(text) != text


def write_parquet(file: Path, rows: int = 1000) -> list[Document]:
    texts = [f"text {i} " + "x" * (i % 50) for i in range(rows)]
    table = pa.table({"text": [*texts, None], "n": range(rows + 1)})
    pq.write_table(table, file, row_group_size=300)
    return [Document(text, f"{file.name}#{i + 1}") for i, text in enumerate(texts)]


def test_parquet_is_the_same_from_pieces_of_any_size(tmp_path: Path) -> None:
    expected = write_parquet(tmp_path / "a.parquet")
    sizes = [
        pq.read_metadata(tmp_path / "a.parquet").row_group(i).total_byte_size for i in range(4)
    ]
    source = Parquet(path=str(tmp_path))
    for limit in (*LIMITS, sum(sizes[:2]), sum(sizes[:3]) - 1):
        items = read_all(source, limit)
        assert documents(items) == expected
        assert reasons(items) == [("a.parquet#1001", "no text")]
    for limit, groups in [
        (1, [(0, 1), (1, 2), (2, 3), (3, 4)]),
        (sum(sizes[:2]), [(0, 2), (2, 4)]),
        (10**9, [(0, 4)]),
    ]:
        assert [(part.start, part.end) for part in source.inputs(limit)] == groups
    by_id = documents(read_all(Parquet(path=str(tmp_path), id_field="n")))
    assert [item.id for item in by_id] == [str(i) for i in range(1000)]
    with pytest.raises(CorpusError, match="no column 'body'; it has text, n"):
        read_all(Parquet(path=str(tmp_path), text_field="body"))


def test_errors_name_a_damaged_parquet_file(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    write_parquet(file)
    whole = file.read_bytes()
    source = Parquet(path=str(tmp_path))
    file.write_bytes(whole[:-100])
    with pytest.raises(CorpusError, match=r"a\.parquet: unreadable"):
        read_all(source)
    # The first page's header: its sizes now are nonsense.
    file.write_bytes(whole[:4] + b"\xff" * 12 + whole[16:])
    with pytest.raises(CorpusError, match=r"a\.parquet: unreadable after 0 records"):
        read_all(source)


def test_a_parquet_record_that_is_not_utf8_is_rejected_alone(tmp_path: Path) -> None:
    bad = pa.array([b"good", b"caf\xe9", b"also good"]).view(pa.string())
    pq.write_table(pa.table({"text": bad}), tmp_path / "a.parquet")
    items = read_all(Parquet(path=str(tmp_path)))
    assert [item.text for item in documents(items)] == ["good", "also good"]
    assert reasons(items) == [("a.parquet#2", "not utf-8")]


def test_damaged_parquet_raises_a_corpus_error_or_is_read(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    write_parquet(file, rows=99)
    whole = file.read_bytes()
    draw = random.Random(1)
    source = Parquet(path=str(tmp_path))
    failed = 0
    for number in range(300):
        # The second half of the mutations hits the footer.
        at = draw.randrange(len(whole) - 1000 if number % 2 else 0, len(whole))
        damage = draw.randbytes(draw.choice([1, 4]))
        file.write_bytes(whole[:at] + damage + whole[at + len(damage) :])
        try:
            assert len(read_all(source)) == 100
        except CorpusError as error:
            assert str(error).startswith(f"{file}: ") and "\n" not in str(error)
            failed += 1
    assert 50 < failed < 250


def test_giant_cells_and_row_groups_are_rejected_and_the_rest_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = "y" * ((1 << 24) + 1)
    table = pa.table({"text": ["one", big, "three", "four"]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    source = Parquet(path=str(tmp_path))
    items = read_all(source)
    assert [item.text for item in documents(items)] == ["one", "three", "four"]
    assert reasons(items) == [("a.parquet#2", "too long")]
    monkeypatch.setattr(row_groups, "_GROUP_LIMIT", 1 << 24)
    items = read_all(source)
    assert documents(items) == [Document("four", "a.parquet#4")]
    assert reasons(items) == [(f"a.parquet#{i}", "too long") for i in (1, 2, 3)]


def test_large_row_groups_are_read_unless_they_expand_or_hold_giants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_groups, "_GROUP_LIMIT", 1000)
    monkeypatch.setattr(row_groups, "_BATCH", 1)  # a record a batch
    expected = write_parquet(tmp_path / "a.parquet")
    source = Parquet(path=str(tmp_path))
    assert documents(read_all(source)) == expected
    monkeypatch.setattr(row_groups, "LINE_LIMIT", 10)  # of the average record
    assert {reason for _, reason in reasons(read_all(source))} == {"too long"}


def test_a_giant_record_is_rejected_under_a_false_footer(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    table = pa.table({"text": ["one", "y" * (1 << 25), "three"]})
    pq.write_table(table, file, compression="zstd", use_dictionary=False)
    chunk = pq.read_metadata(file).row_group(0).column(0)

    def varint(number: int) -> bytes:
        """Return a Thrift integer of four bytes, whatever its value."""
        groups = [2 * number >> shift & 127 for shift in (0, 7, 14, 21)]
        return bytes([*(group | 128 for group in groups[:3]), groups[3]])

    whole = file.read_bytes()
    honest = varint(chunk.total_uncompressed_size)
    assert whole.count(honest) >= 1
    file.write_bytes(whole.replace(honest, varint(1000)))
    assert pq.read_metadata(file).row_group(0).column(0).total_uncompressed_size == 1000
    items = read_all(Parquet(path=str(tmp_path)))
    assert [item.text for item in documents(items)] == ["one", "three"]
    assert reasons(items) == [("a.parquet#2", "too long")]


def test_the_hash_of_row_groups_changes_with_their_bytes_alone(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    write_parquet(file)
    whole = file.read_bytes()
    parts = Parquet(path=str(tmp_path)).inputs(1)
    before = [part.sha256() for part in parts]
    assert len(set(before)) == 4
    second = pq.read_metadata(file).row_group(1).column(0)
    at = second.data_page_offset + 40
    for place, changed in ((at, [1]), (len(whole) - 20, [0, 1, 2, 3])):  # a page; the footer
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        after = [part.sha256() for part in parts]
        assert [i for i in range(4) if after[i] != before[i]] == changed


def test_a_local_dataset_is_hashed_by_its_files(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet")
    (tmp_path / "README.md").write_text("data")
    expected = [
        ("README.md", hashlib.sha256(b"data").hexdigest()),
        ("a.parquet", row_groups.RowGroups(str(tmp_path / "a.parquet")).sha256()),
    ]
    (piece,) = HuggingFace(path=str(tmp_path)).inputs(1)
    assert piece.sha256() == hashlib.sha256(repr(expected).encode()).hexdigest()


def test_huggingface_saved_and_streamed(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    texts = {"text": ["one", "two", ""]}
    datasets.Dataset.from_dict(texts).save_to_disk(tmp_path / "saved")
    datasets.DatasetDict(train=datasets.Dataset.from_dict(texts)).save_to_disk(tmp_path / "dict")
    (tmp_path / "folder").mkdir()
    pq.write_table(pa.table(texts), tmp_path / "folder/train.parquet")
    for name in ("saved", "dict", "folder"):
        source = HuggingFace(path=str(tmp_path / name))
        assert [piece.path for piece in source.inputs(1)] == [source.path]
        items = read_all(source)
        assert documents(items) == [
            Document("one", f"{name}#1"),
            Document("two", f"{name}#2"),
        ]
        assert reasons(items) == [(f"{name}#3", "empty")]
        for key in ("text_field", "id_field", "title_field", "url_field"):
            with pytest.raises(CorpusError, match="no field 'body'; it has text"):
                read_all(HuggingFace.model_validate({"path": source.path, key: "body"}))
    arrow = tmp_path / "saved" / "data-00000-of-00001.arrow"
    arrow.write_bytes(arrow.read_bytes()[:-8])  # between two batches
    with pytest.raises(CorpusError, match=r"arrow: cut short: it has no end marker"):
        read_all(HuggingFace(path=str(tmp_path / "saved")))
    for wrong in ({"path": str(tmp_path / "none")}, {"path": source.path, "split": "dev"}):
        with pytest.raises(CorpusError, match="cannot load") as caught:
            read_all(HuggingFace(**wrong))
        assert "\n" not in str(caught.value)


def test_csv_and_tsv(tmp_path: Path) -> None:
    """Compare with Python's csv module; a bad row is rejected and the others are read."""
    rows = [["1", 'a "quoted", comma'], ["2", "two\nlines"], ["3", "\u00e4"], ["4", ""]]
    with (tmp_path / "a.csv").open("w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file).writerows([["id", "text"], *rows])
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress((tmp_path / "a.csv").read_bytes()))
    for name in ("a.csv", "b.csv.gz"):
        items = read_all(Csv(path=f"{tmp_path}/{name}", id_field="id"), 64)
        assert documents(items) == [Document(text, id) for id, text in rows[:3]]
        assert reasons(items) == [(f"{name}#4", "empty")]
    plain = b'text\tid\n"one\t1\nx\nl\xe4\t3\nlast"\t4\n'
    (tmp_path / "c.tsv").write_bytes(plain)
    items = read_all(Tsv(path=str(tmp_path / "c.tsv"), id_field="id"), 64)
    assert documents(items) == [Document('"one', "1"), Document('last"', "4")]
    assert sorted(reason for _, reason in reasons(items)) == ["malformed row", "not utf-8"]
    with pytest.raises(CorpusError, match=r"c\.tsv: no column 'body'; it has text, id"):
        read_all(Tsv(path=str(tmp_path / "c.tsv"), text_field="body"), 64)
    with pytest.raises(ValueError, match="take kind: csv and text_field"):
        Text(path="reviews/a.csv.gz")


@pytest.mark.parametrize("key", ["text_field", "id_field", "title_field", "url_field"])
def test_a_field_that_no_record_has_is_refused(tmp_path: Path, key: str) -> None:
    """Beside a source that is sound: without text, or ids, a part would be missing in silence."""
    lines = ['{"body": "one", "n": 1}', '{"body": "two", "title": "T"}', "[]", '{"body": null}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.txt").write_text("a text that is sound\n")
    sound = {"kind": "text", "path": str(tmp_path / "b.txt")}
    fields = {"text_field": "body", "id_field": "n", "title_field": "title", key: "bodi"}
    source = {"kind": "jsonl", "path": str(tmp_path / "a.jsonl"), **fields}
    config = CorpusConfig.model_validate(
        {"output": tmp_path / "out", "sources": [sound, source], "tokenizer": {"train": {}}}
    )
    message = r"a\.jsonl: none of its first 3 records has a field 'bodi'; the first one has body"
    for make in (estimate, prepare):
        with pytest.raises(CorpusError, match=message):
            make(config)
    # A field of some records is enough.
    some = Jsonl.model_validate(source | fields | {key: {**fields, key: "title"}[key]})
    some.check(some.inputs(1))
