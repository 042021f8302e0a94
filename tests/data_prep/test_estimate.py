"""Compare the estimate of a dry run with what `prepare` then makes."""

import bz2
import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from data_prep import estimate as module
from data_prep.estimate import Estimate, estimate
from data_prep.prepare import prepare


@pytest.mark.parametrize("compressed", [False, True])
def test_a_sample_of_an_even_corpus_gives_its_size(
    make_config: Any,
    tmp_path: Path,
    known: list[str],
    monkeypatch: pytest.MonkeyPatch,
    compressed: bool,
) -> None:
    draw = random.Random(1)
    texts = [
        " ".join(draw.choices([*known, "stranger"], k=draw.randint(5, 60))) for _ in range(3000)
    ]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    path = tmp_path / ("many.jsonl.bz2" if compressed else "many.jsonl")
    path.write_bytes(bz2.compress(lines) if compressed else lines)
    monkeypatch.setattr(module, "SAMPLE_BYTES", 60_000)
    monkeypatch.setattr(module, "PIECE_BYTES", 10_000)
    config = make_config(sources=[{"kind": "jsonl", "path": str(path)}], row_length=(32, 64))
    found = estimate(config)
    (source,) = found.sources
    manifest = prepare(config)
    tokens = sum(split.tokens for split in manifest.splits.values())
    rows = sum(split.rows for split in manifest.splits.values())
    assert source.share < 0.2 or compressed  # bz2 is read in larger steps
    assert source.documents == pytest.approx(3000, rel=0.1)
    assert source.tokens == pytest.approx(tokens, rel=0.1)
    assert source.rows[32] == pytest.approx(rows, rel=0.1)
    assert source.unknown == pytest.approx(1 / (len(known) + 1), rel=0.2)
    assert found.shard_bytes == 2 * (32 * source.rows[32] + 64 * source.rows[64])
    assert not (tmp_path / "out" / ".work").exists()


def test_a_small_corpus_is_read_whole(make_config: Any, tmp_path: Path) -> None:
    config = make_config(validation=0, deduplicate={"documents": "none"})
    (source,) = estimate(config).sources
    manifest = prepare(config)
    assert source.share == 1.0
    assert (source.documents, source.kept) == (60, 60)
    segments = manifest.splits["train"].segments
    # two special tokens a document here, two a segment there
    assert manifest.splits["train"].tokens == source.tokens + 2 * (segments - 60)
    assert source.rows == {32: manifest.splits["train"].rows}
    kept = estimate(make_config(validation=0, keep_text=True))
    texts = sum(len(path.read_bytes().strip()) for path in (tmp_path / "texts").iterdir())
    # Each of the 6 files has 9 blank lines between its documents.
    assert kept.shard_bytes == 2 * 32 * source.rows[32] + texts - 6 * 9 * 2


def test_one_large_unit_takes_its_time_whatever_the_workers(
    make_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "".join(json.dumps({"text": f"word {n} " * 20}) + "\n" for n in range(6000)).encode()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "a.jsonl").write_bytes(lines)
    monkeypatch.setattr(module, "SAMPLE_BYTES", 5_000)
    monkeypatch.setattr(module, "PIECE_BYTES", 10_000)

    def estimated(name: str, workers: int) -> Estimate:
        source = {"kind": "jsonl", "path": str(tmp_path / name)}
        return estimate(make_config(sources=[source], workers=workers))

    packed = estimated("a.jsonl.gz", 64)
    (source,) = packed.sources
    assert source.is_beginning and source.longest > 0.3 * source.seconds
    assert packed.seconds == source.longest > 10 * source.seconds / 64
    plain = estimated("a.jsonl", 8)
    (source,) = plain.sources
    assert not source.is_beginning and source.longest < source.seconds / 64
    assert plain.seconds == source.seconds / 8


def test_a_vocabulary_is_trained_on_the_sample(make_config: Any) -> None:
    found = estimate(make_config(tokenizer={"train": {"vocab_size": 150}}))
    assert found.trained and found.vocab_size <= 150 and found.sources[0].unknown < 0.01
