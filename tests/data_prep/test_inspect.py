"""Compare the origin of rows and the places of documents with the input files."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from data_prep import CorpusError
from data_prep.inspect import decoded, documents_of_row, leftovers
from data_prep.prepare import prepare
from data_prep.shards import load_manifest, open_shards
from data_prep.tokens import load

WILD = "50% of *all* [a-z]? \\d+ 'quoted'"
TITLE = "A title\nof two lines"


@pytest.fixture
def texts(known: list[str]) -> dict[str, str]:
    """Return documents by id: the same words in 30 orders, so that none is a near-duplicate."""
    draw = random.Random(8)
    return {f"doc {n}": " ".join(draw.sample(known, 60)) for n in range(0, 60, 2)}


@pytest.fixture
def folder(tmp_path: Path, make_config: Any, known: list[str], texts: dict[str, str]) -> Path:
    """Build two sources of records; one id is in both, one consists of wild cards.

    In the first source the id "doc 0" is the title of "doc 2".
    """
    first = [
        {"text": text, "key": id, "name": f"Title of {id}", "link": f"https://example.org/{id}"}
        for id, text in texts.items()
    ]
    first[1]["name"] = "doc 0"
    second = [
        {"text": " ".join(known[::-1]), "key": "doc 4", "name": TITLE, "link": ""},
        {"text": " ".join(known[::-3] * 3), "key": WILD, "name": "", "link": ""},
        {"text": " ", "key": "doc blank", "name": "", "link": ""},
    ]
    for name, records in (("first", first), ("second", second)):
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (tmp_path / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    fields = {"id_field": "key", "title_field": "name", "url_field": "link"}
    config = make_config(
        sources=[
            {"kind": "jsonl", "path": str(tmp_path / f"{name}.jsonl"), "licence": licence, **fields}
            for name, licence in (("first", "CC-BY-SA-4.0"), ("second", "public domain"))
        ]
    )
    prepare(config, part_bytes=2_000)
    assert len(load_manifest(config.output).splits["train"].shards) > 1
    return Path(config.output)


def splits(folder: Path) -> list[Any]:
    return list(load_manifest(folder).splits)


def test_every_segment_of_every_row_is_named_and_lies_in_its_document(
    folder: Path, texts: dict[str, str]
) -> None:
    seen: set[str] = set()
    for split in splits(folder):
        shards = open_shards(folder, split)
        for row in range(len(shards)):
            ids = shards.rows([row])[0]
            segments = documents_of_row(folder, row, split)
            # Spans found independently: from each [CLS] (2) to the next [SEP] (3).
            starts = np.flatnonzero(ids == 2).tolist()
            ends = (np.flatnonzero(ids == 3) + 1).tolist()
            assert [(s.start, s.end) for s in segments] == list(zip(starts, ends, strict=True))
            assert [s.number for s in segments] == list(range(len(starts)))
            for segment in segments:
                if segment.source == "first.jsonl":
                    assert segment.text in texts[segment.document]
                    assert segment.licence == "CC-BY-SA-4.0" and segment.kind == "jsonl"
                    assert segment.url == f"https://example.org/{segment.document}"
                    seen.add(segment.document)
    assert seen == set(texts)


def test_the_rows_of_a_document_hold_all_of_its_tokens(folder: Path, texts: dict[str, str]) -> None:
    # By the filter of docs/CORPUS.md; a row counts within its file.
    tokens = load(folder / "tokenizer")
    table = ds.dataset(folder / "segments")
    files = {
        shard.file.partition(".")[0]: (split, sum(s.rows for s in record.shards[:number]))
        for split, record in load_manifest(folder).splits.items()
        for number, shard in enumerate(record.shards)
    }
    for id, text in texts.items():
        wanted = (ds.field("document") == id) & (ds.field("source") == 0)
        held: list[int] = []
        for fragment in table.get_fragments():
            split, before = files[Path(fragment.path).stem]
            for place in fragment.to_table(filter=wanted).to_pylist():
                ids = open_shards(folder, split).rows([before + place["row"]])[0].tolist()
                assert ids[place["start"]] == 2
                held += ids[place["start"] + 1 : ids.index(3, place["start"])]
        assert sorted(held) == sorted(tokens.encode(text).tolist())


def test_rows_outside_the_split_are_refused_with_its_bounds(folder: Path) -> None:
    last = len(open_shards(folder)) - 1
    for row in (-1, last + 1):
        with pytest.raises(CorpusError, match=rf"train has rows 0 to {last}, not {row}"):
            documents_of_row(folder, row)


def test_a_damaged_side_table_is_named(folder: Path) -> None:
    path = folder / "segments" / "train-00000.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CorpusError, match=r"train-00000\.parquet: 2\d+ bytes, the manifest"):
        documents_of_row(folder, 0)
    path.unlink()
    with pytest.raises(CorpusError, match=r"train-00000\.parquet: missing"):
        documents_of_row(folder, 0)


def test_an_edited_side_table_is_refused(folder: Path) -> None:
    path = folder / "segments" / "train-00000.parquet"
    table = pq.read_table(path)
    titles = pa.array(["Another title"] * len(table), table.schema.field("title").type)
    number = table.schema.get_field_index("title")
    pq.write_table(table.set_column(number, table.schema.field(number), titles), path)
    for question in (
        lambda: documents_of_row(folder, 0),
        lambda: decoded(folder),
    ):
        with pytest.raises(CorpusError, match=r"train-00000\.parquet.*the manifest"):
            question()


@pytest.mark.parametrize(
    ("name", "question"),
    [
        ("tokenizer/tokenizer.json", lambda folder: documents_of_row(folder, 0)),
        ("tokenizer/tokenizer.json", decoded),
        ("leftovers.jsonl", leftovers),
    ],
    ids=["row", "inspect-tokenizer", "leftovers"],
)
def test_an_edited_file_is_refused(
    folder: Path, name: str, question: Callable[[Path], object]
) -> None:
    with (folder / name).open("ab") as file:
        file.write(b"\n")
    with pytest.raises(CorpusError, match=rf"{name}.*the manifest"):
        question(folder)
