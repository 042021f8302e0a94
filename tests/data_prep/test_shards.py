"""Check that rows are read as by other readers, and that damage is noticed."""

import hashlib
import json
import random
import re
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
import xxhash
from support.preparing import flip_bit
from support.shard_folders import make_folder, reseal

from data_prep import CorpusError
from data_prep.disk import write_file
from data_prep.shards import (
    check,
    load_manifest,
    open_shards,
    verify,
    vocabulary_sha256,
    write_shard,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a finished folder with several shards."""
    make_folder(tmp_path / "out")
    return tmp_path / "out"


def all_rows(folder: Path) -> npt.NDArray[Any]:
    """Return every training row, read without any of our code."""
    rows = []
    for path in sorted(folder.glob("train-*.arrow")):
        with pa.ipc.open_stream(path.read_bytes()) as stream:
            rows += stream.read_all()["input_ids"].to_pylist()
    return np.array(rows)


def test_rows_of_any_order(folder: Path) -> None:
    expected = all_rows(folder)
    shards = open_shards(folder)
    assert len(shards.manifest.splits["train"].shards) > 2
    assert len(shards) == len(expected)
    assert shards.row_length == 32
    draw = random.Random(0)
    indices = [draw.randrange(len(shards)) for _ in range(300)]
    found = shards.rows(np.array(indices))
    assert found.dtype == np.uint16
    assert np.array_equal(found, expected[indices])
    assert shards.rows(np.array([], dtype=np.int64)).shape == (0, 32)
    for outside in (-1, len(shards)):
        with pytest.raises(IndexError):
            shards.rows([outside])


def test_a_shard_set_is_pickled_as_its_folder_name(folder: Path) -> None:
    shards = open_shards(folder)
    first = shards.rows([0, 1])
    pickled = ForkingPickler.dumps(shards)  # as a DataLoader worker receives it
    assert len(pickled) < 1000
    assert np.array_equal(ForkingPickler.loads(pickled).rows([0, 1]), first)


def test_datasets_opens_a_shard(folder: Path, tmp_path: Path) -> None:
    import datasets

    files = sorted(str(path) for path in folder.glob("train-*.arrow"))
    loaded = datasets.load_dataset(
        "arrow", data_files=files, split="train", cache_dir=str(tmp_path / "cache")
    )
    assert np.array_equal(np.array(loaded["input_ids"]), all_rows(folder))


def test_vocabulary_sha256() -> None:
    assert vocabulary_sha256(["a", "b"]) == hashlib.sha256(b"a\nb").hexdigest()


def test_the_damaged_block_is_named(tmp_path: Path) -> None:
    rows = np.arange(3 * 2**18, dtype=np.uint32).reshape(-1, 64)  # 3 MiB
    record = write_shard(tmp_path / "a.arrow", rows, pad=0)
    assert len(record.blocks) == 4  # and a header
    assert record.tokens == rows.size - 1
    data = (tmp_path / "a.arrow").read_bytes()
    assert record.sha256 == hashlib.sha256(data).hexdigest()
    assert record.blocks[1] == xxhash.xxh3_128(data[2**20 : 2**21]).hexdigest()


@pytest.mark.parametrize("place", [0, 100, 2**20 - 1, 2**20 + 700, 2**21, -1])
def test_rows_are_verified_when_they_are_first_read(tmp_path: Path, place: int) -> None:
    # Block b holds bytes b * 2**20 to (b + 1) * 2**20; all but the two ends may stay unread.
    make_folder(tmp_path / "out", row_length=512, rows=2500, shards=1)
    path = tmp_path / "out" / "train-00000.arrow"
    data = path.read_bytes()
    block = place % len(data) >> 20
    first = data.index(open_shards(tmp_path / "out").rows([0]).tobytes())
    flip_bit(path, place, 16)
    end = min((block + 1) << 20, len(data))
    message = f"00000.arrow: block {block} differs from the manifest .bytes {block << 20}-{end}"
    found = []
    shards = open_shards(tmp_path / "out")
    for row in range(0, 2500, 3):
        try:
            shards.rows([row])
        except CorpusError as error:
            assert re.search(message, str(error)) and "distil prepare" in str(error)
            found.append(row)
    if block in (0, len(data) - 1 >> 20):
        assert found == list(range(0, 2500, 3))  # the schema and the end belong to every row
    else:
        inside = [
            row
            for row in range(0, 2500, 3)
            if first + row * 1024 < (block + 1) << 20 and first + (row + 1) * 1024 > block << 20
        ]
        assert found == inside and len(inside) > 300
    [problem] = verify(tmp_path / "out")
    assert "00000.arrow: differs from the manifest" in problem


def test_a_row_over_many_blocks_is_verified_in_all_of_them(folder: Path) -> None:
    # Blocks of 16 bytes, rows of 64: any flipped bit of the row is found, no other row's is.
    manifest = load_manifest(folder)
    train = manifest.splits["train"]
    path = folder / train.shards[0].file
    data = path.read_bytes()
    blocks = [xxhash.xxh3_128_hexdigest(data[i : i + 16]) for i in range(0, len(data), 16)]
    first = train.shards[0].model_copy(update={"block_bytes": 16, "blocks": tuple(blocks)})
    train = train.model_copy(update={"shards": (first, *train.shards[1:])})
    reseal(folder, splits=manifest.splits | {"train": train})
    start = data.index(open_shards(folder).rows([20]).tobytes())
    for place in range(start, start + 64, 5):
        flip_bit(path, place)
        with pytest.raises(CorpusError, match=f"block {place // 16} differs"):
            open_shards(folder).rows([3, 20])
        open_shards(folder).rows([18, 22])
        path.write_bytes(data)


@pytest.mark.parametrize("damage", ["truncated", "missing", "longer"])
def test_files_of_another_size_are_refused(folder: Path, damage: str) -> None:
    path = folder / "train-00001.arrow"
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(data[:-100] if damage == "truncated" else data + b"\0")
    expected = "missing" if damage == "missing" else "train-00001.arrow"
    for full in (False, True):
        assert any(expected in problem for problem in verify(folder, full=full))
    for use in (check, open_shards):
        with pytest.raises(CorpusError, match=expected):
            use(folder)


def test_a_file_cut_short_after_opening(folder: Path) -> None:
    shards = open_shards(folder)
    path = folder / "train-00001.arrow"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CorpusError, match="train-00001"):
        shards.rows([shards.manifest.splits["train"].shards[0].rows])
    assert shards.rows([0]).shape == (1, 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values.update(format_version=3), "format version 3"),
        (lambda values: values.update(format_version=1), "run `distil prepare` again"),
        (lambda v: v["splits"]["train"]["shards"][1]["blocks"].pop(), r"shards\.1 .*0 blocks for"),
        (lambda values: values["sources"][0].pop("noted"), r"damaged at sources\.0\.noted"),
        (lambda values: values.update(row_length=64), "edited or damaged"),
        (lambda values: values.update(digest="0" * 64), "edited or damaged"),
        (lambda values: values["sources"][0].update(licence="MIT"), "edited or damaged"),
        (lambda values: values["files"][0].update(file="../../etc/passwd"), r"files\.0\.file"),
        (lambda values: values["files"][0].update(file="/etc/passwd"), r"files\.0\.file"),
        (lambda values: values.update(extra=1), "damaged at extra"),
        (lambda values: values.pop("format_version"), "damaged"),
    ],
)
def test_edited_manifests_are_refused(
    folder: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    values = json.loads((folder / "manifest.json").read_text())
    change(values)
    (folder / "manifest.json").write_text(json.dumps(values))
    with pytest.raises(CorpusError, match=message) as caught:
        open_shards(folder)
    assert "\n" not in str(caught.value)
    assert verify(folder) == [str(caught.value)]


def test_a_folder_without_a_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="no finished shards; run `distil prepare`"):
        open_shards(tmp_path)
    for text in ("", "[]", "{", "\x00", "[" * 100_000):
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(CorpusError, match="damaged"):
            load_manifest(tmp_path)


LAST_SEP = -1  # stands for the place of the last [SEP]


@pytest.mark.parametrize(
    ("place", "ids", "message"),
    [
        (1, 60_000, "outside the vocabulary"),
        (0, 5, "start with"),
        (1, 0, "padding inside"),
        (1, 4, "MASK"),
        (LAST_SEP, 5, "not .CLS. ... .SEP."),
        (slice(None), [2, 5, 3] * 3 + [0] * 23, "segments"),
        (1, 5, "counts differ"),
    ],
)
def test_rows_that_break_the_rules_under_right_hashes(
    folder: Path, place: Any, ids: Any, message: str
) -> None:
    """Break a rule of rows in row 1; ids: 0 pad, 2 [CLS], 3 [SEP], 4 [MASK]."""
    manifest = load_manifest(folder)
    old = manifest.splits["train"].shards[0]
    rows = open_shards(folder).rows(np.arange(old.rows))
    place = np.flatnonzero(rows[1] == 3)[-1] if place == LAST_SEP else place
    assert np.any(rows[1, place] != ids)
    rows[1, place] = ids
    shard = write_shard(folder / old.file, rows, pad=0)
    train = manifest.splits["train"]
    tokens = train.tokens - old.tokens + shard.tokens
    train = train.model_copy(update={"shards": (shard, *train.shards[1:]), "tokens": tokens})
    reseal(folder, splits=manifest.splits | {"train": train})
    problems = verify(folder)
    assert any(re.search(message, problem) for problem in problems), problems


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail(file: Any) -> None:
        file.write(b"new")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_file(path, fail)
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
