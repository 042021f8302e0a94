"""Damage a folder of shards in many ways, and check that all of them are noticed."""

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from support.shard_folders import make_folder

from data_prep import CorpusError
from data_prep.shards import Segments, check, open_shards, verify

PAGE = 4096
MUTATIONS = ("flip", "zero", "truncate", "append", "swap")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write shards of three blocks, of which only the middle one has nothing but rows."""
    path = tmp_path_factory.mktemp("mutations") / "out"
    manifest = make_folder(path, row_length=512, rows=2100, shards=2, texts=True)
    assert {len(shard.blocks) for shard in manifest.splits["train"].shards} == {3}
    return path


def mutate(data: bytes, kind: str, draw: random.Random, other: bytes) -> bytes:
    if kind == "flip":
        place = draw.randrange(len(data))
        return data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :]
    if kind == "zero":
        start = draw.randrange(-(-len(data) // PAGE)) * PAGE
        size = len(data[start : start + PAGE])
        return data[:start] + bytes(size) + data[start + size :]
    if kind == "truncate":
        return data[: draw.choice([0, len(data) - 1, draw.randrange(len(data))])]
    if kind == "append":
        return data + draw.choice([b"\0", b"\n", draw.randbytes(draw.randint(1, PAGE))])
    return other


def read_everything(folder: Path) -> None:
    """Read every row as training does, in an order that mixes the shards, and every text."""
    for split in ("train", "validation"):
        shards = open_shards(folder, split)
        segments = Segments(shards)
        for rows in np.array_split(np.random.default_rng(0).permutation(len(shards)), 5):
            shards.rows(rows)
            segments.of_rows(rows)
        assert None not in segments.texts(0, len(segments))


def test_the_undamaged_folder_is_accepted(folder: Path) -> None:
    assert verify(folder, full=True) == []
    check(folder)
    read_everything(folder)


@pytest.mark.parametrize("num", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_every_mutation_is_reported(folder: Path, num: int) -> None:
    # Mutate shards and any file, half each; `verify` reports every mutation.
    draw = random.Random(1)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    shards = [path for path in files if path.suffix == ".arrow"]  # and files of texts
    read = [*shards, *(path for path in files if path.suffix == ".parquet")]
    done: Counter[tuple[str, str]] = Counter()
    while done.total() < num:
        path = draw.choice(shards if done.total() % 2 else files)
        kind = draw.choice(MUTATIONS)
        alike = [other for other in files if other.suffix == path.suffix and other != path]
        original = path.read_bytes()
        other = draw.choice(alike).read_bytes() if alike else b""
        damaged = mutate(original, kind, draw, other)
        if damaged == original:
            continue  # zeroed zeros, say
        path.write_bytes(damaged)
        where = f"{kind} of {path.name}, number {done.total()}"
        problems = verify(folder, full=True)
        assert problems, where
        assert all(str(path) in problem and "\n" not in problem for problem in problems), where
        if path in read:
            with pytest.raises(CorpusError, match=path.name):
                read_everything(folder)
        path.write_bytes(original)
        done[kind, path.suffix] += 1
    assert {suffix for _, suffix in done} >= {".arrow", ".parquet", ".json", ".jsonl", ".txt"}
    assert all(done[kind, ".arrow"] > num // 20 for kind in MUTATIONS)
    assert verify(folder, full=True) == []
