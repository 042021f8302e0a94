"""Check which segments are whole documents, their numbers and their texts against the sources."""

import json
import shutil
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.preparing import contents, flip_bit, records_source
from support.processes import python
from support.shard_folders import make_folder, reseal

from data_prep import CorpusError
from data_prep.inspect import documents_of_row
from data_prep.prepare import prepare
from data_prep.publish import upload
from data_prep.shards import Segments, load_manifest, open_shards, verify, write_texts
from data_prep.shards.reading import Split
from data_prep.shards.writing import file_record

SPLITS: tuple[Split, ...] = ("train", "validation")


@pytest.fixture
def folder(make_config: Any) -> Path:
    """Return a corpus of several shards that keeps its text; about half of it is cut."""
    config = make_config(keep_text=True)
    prepare(config, part_bytes=2_000)
    return Path(config.output)


def expected(folder: Path, split: str) -> list[list[str | None]]:
    """Return the text or None of each segment, row by row, without any of our readers.

    A document of the fixture is a paragraph: its id is FILE@OFFSET. Each of its words and brackets
    is a token, so that it is whole if it has at most 30.
    """
    found: list[list[str | None]] = []
    for path in sorted(folder.glob(f"{split}-*.arrow")):
        num_rows = pa.ipc.open_stream(path).read_all().num_rows
        rows: list[list[str | None]] = [[] for _ in range(num_rows)]
        table = pq.read_table(folder / "segments" / f"{path.stem}.parquet")
        for segment in table.to_pylist():
            file, offset = segment["document"].split("@")
            data = (folder.parent / "texts" / file).read_bytes()
            text = data[int(offset) :].split(b"\n\n")[0].strip().decode()
            length = len(text.replace("[", " [ ").replace("]", " ] ").split())
            rows[segment["row"]].append(text if length <= 30 else None)
        found += rows
    return found


def test_segments_and_texts_are_those_of_the_documents(folder: Path) -> None:
    assert verify(folder) == []
    for split in SPLITS:
        shards = open_shards(folder, split)
        segments = Segments(shards)
        rows = expected(folder, split)
        texts = [text for row in rows for text in row]
        assert 0.2 < sum(text is None for text in texts) / len(texts) < 0.9
        assert len(segments) == len(texts) == shards.manifest.splits[split].segments
        # Any rows, in any order, some of them twice.
        first = np.cumsum([0, *map(len, rows)])
        draw = np.random.default_rng(0)
        for chosen in (draw.integers(len(rows), size=7), np.arange(len(rows)), [], [len(rows) - 1]):
            found = segments.of_rows(chosen)
            assert found.counts.tolist() == [len(rows[row]) for row in chosen]
            numbers = [n for row in chosen for n in range(first[row], first[row + 1])]
            assert found.numbers.tolist() == numbers
            assert found.whole.tolist() == [texts[number] is not None for number in numbers]
            # As many segments as there are [CLS] (id 2) in the rows themselves.
            ids = shards.rows(chosen)
            assert np.array_equal(found.counts, np.count_nonzero(ids == 2, axis=1))
        for start in (0, 1, len(texts) // 2, len(texts)):
            for end in (start, len(texts)):
                assert segments.texts(start, end) == texts[start:end]
        for row in (-1, len(rows)):
            with pytest.raises(IndexError, match="row outside"):
                segments.of_rows([row])
        with pytest.raises(IndexError, match=r"segments 0 to .* outside"):
            segments.texts(0, len(texts) + 1)


def test_a_corpus_without_texts_has_the_bytes_it_had(
    folder: Path, make_config: Any, tmp_path: Path
) -> None:
    config = make_config(output=tmp_path / "plain")
    prepare(config, part_bytes=2_000)
    plain, kept = contents(config.output), contents(folder)
    assert {n for n in kept if n not in plain} == {n for n in kept if n.startswith("texts/")}
    changed = {name for name in plain if plain[name] != kept[name]}
    assert changed == {"manifest.json", "provenance.jsonl"}  # they list the texts
    assert "keep_text" not in config.content(32) and b"keep_text" not in plain["manifest.json"]
    manifest = load_manifest(config.output)
    assert not manifest.has_texts and load_manifest(folder).has_texts
    # Which documents are whole is known in any case.
    there, here = (Segments(open_shards(path)) for path in (folder, config.output))
    rows = np.arange(len(there.shards))
    assert all(map(np.array_equal, there.of_rows(rows), here.of_rows(rows)))
    with pytest.raises(CorpusError, match=r"plain: keeps no text: .*`keep_text: true`") as caught:
        here.texts(0, 1)
    assert "\n" not in str(caught.value)
    # With texts it is another corpus, for another `output`.
    with pytest.raises(CorpusError, match=r"keep_text: null there, true here.*another `output`"):
        prepare(make_config(output=config.output, keep_text=True))


def test_documents_that_share_an_id_count_as_cut(make_config: Any, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    texts = [f"{word} text and more" for word in ("a", "literal", "sep", "pad")]
    source = records_source(path, texts, id_field="id")
    records = [{"text": text, "id": id} for text, id in zip(texts, "xxyz", strict=True)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    other = records_source(tmp_path / "e.jsonl", [texts[0] + " mask"], id_field="id")
    (tmp_path / "e.jsonl").write_text(json.dumps({"text": texts[0] + " mask", "id": "y"}) + "\n")
    kinds = {"deduplicate": {"documents": "exact"}, "validation": 0, "row_length": [16, 32]}
    config = make_config(sources=[source, other], keep_text=True, **kinds)
    prepare(config)
    for row_length in config.row_lengths:
        assert verify(config.folder(row_length)) == []
        segments = Segments(open_shards(config.folder(row_length)))
        whole = segments.of_rows(np.arange(len(segments.shards))).whole
        # The id "y" is in both sources, and it is whole in both.
        found = dict(zip(segments.texts(0, len(segments)), whole.tolist(), strict=True))
        assert found == {text: text not in texts[:2] for text in (*texts, texts[0] + " mask")}


def test_pickled_segments_are_read_again_without_pandas(folder: Path) -> None:
    segments = Segments(open_shards(folder))
    before = segments.of_rows([0, 3]), segments.texts(0, 9)
    pickled = ForkingPickler.dumps(segments)  # as a DataLoader worker receives it
    assert len(pickled) < 1000
    again = ForkingPickler.loads(pickled)
    assert all(map(np.array_equal, again.of_rows([0, 3]), before[0]))
    assert again.texts(0, 9) == before[1]
    code = (
        "import sys\nfrom data_prep.shards import Segments, open_shards\n"
        "segments = Segments(open_shards(sys.argv[1]))\n"
        "segments.of_rows([0]), segments.texts(0, 9)\nassert 'pandas' not in sys.modules\n"
    )
    done = python("-c", code, str(folder))
    assert done.returncode == 0, done.stderr


def test_texts_are_published_and_shown(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    assert upload(folder, f"file://{copy}") == "done"
    assert contents(copy) == contents(folder) and verify(copy) == []
    for row, kept in enumerate(expected(folder, "train")):
        assert [segment.kept_text for segment in documents_of_row(folder, row)] == kept


def swapped(path: Path) -> None:
    """Replace a file by its neighbour's content."""
    path.write_bytes(path.with_name(path.name.replace("00001", "00002")).read_bytes())


@pytest.mark.parametrize("damage", [flip_bit, Path.unlink, swapped], ids=["bit", "gone", "swapped"])
@pytest.mark.parametrize("kind", ["texts/train-00001.arrow", "segments/train-00001.parquet"])
def test_a_damaged_side_file_is_refused_in_one_line(
    folder: Path, kind: str, damage: Callable[[Path], None]
) -> None:
    def read_all(folder: Path) -> list[str | None]:
        segments = Segments(open_shards(folder))
        segments.of_rows(np.arange(len(segments.shards)))
        return segments.texts(0, len(segments))

    before = read_all(folder)
    damage(folder / kind)
    problems = verify(folder)
    assert problems and all(kind in problem for problem in problems)
    with pytest.raises(CorpusError, match=f"{kind}: .*: restore it, or run") as caught:
        read_all(folder)
    assert "\n" not in str(caught.value)
    if "texts" in kind:  # the other files are read as before
        assert Segments(open_shards(folder)).texts(0, 3) == before[:3]


def test_damaged_texts_are_made_again(folder: Path, make_config: Any) -> None:
    before = contents(folder)
    flip_bit(folder / "texts/validation-00000.arrow")
    warnings: list[str] = []
    prepare(make_config(keep_text=True), warn=warnings.append, part_bytes=2_000)
    assert contents(folder) == before
    assert [warning.endswith("is not whole: making it again") for warning in warnings] == [True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("no text", "texts/train-00001.arrow: has no text of a whole document"),
        ("other row", "texts/train-00001.arrow: does not match the segments"),
        ("too few", "texts/train-00001.arrow: does not match the segments"),
        ("a shard", "texts/train-00001.arrow: does not decode"),
        ("not listed", "texts/train-00001.arrow: not in the manifest"),
    ],
)
def test_texts_that_break_the_rules_under_right_hashes(
    tmp_path: Path, change: str, message: str
) -> None:
    folder, name = tmp_path / "out", "texts/train-00001.arrow"
    manifest = make_folder(folder, texts=True)
    table = pa.ipc.open_stream(folder / name).read_all()
    rows, texts = table["row"].to_pylist(), table["text"].to_pylist()
    texts[7] = None if change == "no text" else texts[7]
    rows[7] += change == "other row"
    end = len(rows) - (change == "too few")
    write_texts(folder / name, rows[:end], texts[:end])
    if change == "a shard":
        shutil.copy(folder / "train-00001.arrow", folder / name)
    files = [file for file in manifest.files if file.file != name]
    files += [file_record(folder, name)] if change != "not listed" else []
    reseal(folder, files=tuple(sorted(files, key=lambda file: file.file)))
    assert [message in problem for problem in verify(folder)] == [True]
    segments = Segments(open_shards(folder))
    if change in ("too few", "a shard", "not listed"):
        with pytest.raises(CorpusError, match=name):
            segments.texts(0, len(segments))


def test_a_side_table_that_breaks_the_rules_under_right_hashes(tmp_path: Path) -> None:
    folder, name = tmp_path / "out", "segments/train-00001.parquet"
    manifest = make_folder(folder)
    table = pq.read_table(folder / name)
    files = [file for file in manifest.files if file.file != name]
    for changed, message in (
        (table[1:], "side tables name .* segments, the manifest says"),
        (table.set_column(0, "row", pa.array(table["row"].to_numpy() + 1)), "does not match"),
        (table.drop_columns("document"), "does not decode"),
    ):
        pq.write_table(changed, folder / name)
        reseal(folder, files=(*files, file_record(folder, name)))
        with pytest.raises(CorpusError, match=message) as caught:
            Segments(open_shards(folder)).of_rows(np.arange(60))
        assert "\n" not in str(caught.value)
