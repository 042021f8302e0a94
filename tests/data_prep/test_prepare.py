"""The whole corpus stage, read back and compared with the texts it was given."""

import json
import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from data_prep import CorpusError
from data_prep.config import CorpusConfig
from data_prep.engines import run
from data_prep.finish import smoothing
from data_prep.inspect import summary
from data_prep.prepare import prepare
from data_prep.shards import Manifest, load_manifest, open_shards, verify
from data_prep.shards.manifest import SpecialIds
from data_prep.sources import Document, inputs, read

SMALL_PARTS = 2_000  # bytes: several parts, units and shards from a few kB


def documents(config: CorpusConfig) -> list[tuple[int, Document]]:
    """All documents, straight from the readers."""
    found = []
    for number, source in enumerate(config.sources):
        for name in inputs(source):
            found += [(number, item) for item in read(source, name) if isinstance(item, Document)]
    return found


def read_back(folder: Path, manifest: Manifest, split: str) -> dict[tuple[int, str], list[str]]:
    """(source, document id) -> its token strings, from the rows and the side tables alone."""
    tokens = (folder / "tokenizer" / "vocab.txt").read_text().split("\n")
    special = manifest.tokenizer.special_ids
    texts: dict[tuple[int, str], list[str]] = defaultdict(list)
    if split not in manifest.splits:
        return texts
    rows = open_shards(folder, split).rows(np.arange(manifest.splits[split].rows))
    first = 0
    for shard in manifest.splits[split].shards:
        name = shard.file.replace(".arrow", ".parquet")
        table = pq.read_table(folder / "segments" / name).to_pylist()
        for segment in table:
            ids = rows[first + segment["row"]][segment["start"] :].tolist()
            assert ids[0] == special.cls
            piece = ids[1 : ids.index(special.sep)]
            texts[(segment["source"], segment["document"])].append(
                " ".join(tokens[id] for id in piece)
            )
        first += shard.rows
    return texts


def spaced(text: str) -> list[str]:
    """What WordPiece makes of words that are all in the vocabulary."""
    return text.replace("[", " [ ").replace("]", " ] ").lower().split()


@pytest.mark.parametrize("row_length", [16, 512])
def test_round_trip(make_config: Any, row_length: int) -> None:
    config = make_config(row_length=row_length)
    manifest = prepare(config, part_bytes=SMALL_PARTS)
    assert verify(config.output) == []
    splits = {name: read_back(config.output, manifest, name) for name in ("train", "validation")}
    assert not splits["train"].keys() & splits["validation"].keys()
    found = splits["train"] | splits["validation"]
    seen: set[str] = set()
    expected = {}
    for number, document in documents(config):
        if document.text not in seen:  # the first of equal texts survives
            expected[number, document.id] = spaced(document.text)
        seen.add(document.text)
    assert found.keys() == expected.keys()
    for key, pieces in found.items():
        limit = row_length - 2
        words = expected[key]
        wanted = [words[start : start + limit] for start in range(0, len(words), limit)]
        assert Counter(pieces) == Counter(" ".join(piece) for piece in wanted)
    counts = json.loads((config.output / "token_counts.json").read_text())["counts"]
    assert counts[manifest.tokenizer.special_ids.mask] == 0
    assert counts[manifest.tokenizer.special_ids.unk] == 0


def test_counts_reconcile(make_config: Any, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "a.txt").write_bytes(
        b"fine words of text\n\xff\xfe broken\nx\n\na\0b\nfine words of text\n"
    )
    source = {"kind": "text", "path": str(bad), "document": "line", "name": "bad", "licence": "CC0"}
    base = make_config()
    config = base.model_copy(
        update={
            "sources": (
                *base.sources,
                CorpusConfig.model_validate({"output": "x", "sources": [source]}).sources[0],
            ),
            "min_characters": 3,
        }
    )
    manifest = prepare(config)
    texts, lines = manifest.sources
    assert (texts.documents_in, texts.dropped) == (60, {"duplicate": 10})
    assert texts.documents_kept == 50
    assert (lines.name, lines.licence, lines.documents_in) == ("bad", "CC0", 5)
    assert lines.dropped == {"binary": 1, "duplicate": 1, "not utf-8": 1, "too short": 1}
    assert lines.documents_kept == 1
    assert lines.characters == len("fine words of text")
    quarantine = (config.output / "quarantine.jsonl").read_text(encoding="ascii").splitlines()
    assert [json.loads(line)["reason"] for line in quarantine] == ["not utf-8", "binary"]
    assert json.loads(quarantine[0])["source"] == "bad"


def test_the_first_source_keeps_a_duplicate(make_config: Any, tmp_path: Path) -> None:
    for name, text in (("b", "mask and pad\nstay text\n"), ("a", "stay text\nmask and pad\nsep\n")):
        (tmp_path / f"{name}.txt").write_text(text)
    sources = [
        {"kind": "text", "path": str(tmp_path / f"{name}.txt"), "document": "line"} for name in "ba"
    ]
    config = make_config(sources=sources, validation=0)
    manifest = prepare(config)
    assert [source.documents_kept for source in manifest.sources] == [2, 1]
    assert "validation" not in manifest.splits
    with pytest.raises(CorpusError, match="no validation split"):
        open_shards(config.output, "validation")


def tree(folder: Path) -> dict[str, bytes]:
    """Every file of a folder but those that hold input times."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("train", [False, True])
def test_workers_change_no_byte(make_config: Any, tmp_path: Path, train: bool) -> None:
    changes = {"tokenizer": {"train": {"vocab_size": 120}}} if train else {}
    manifests = [
        prepare(
            make_config(output=tmp_path / f"out{workers}", workers=workers, **changes),
            part_bytes=SMALL_PARTS,
        )
        for workers in (1, 2)
    ]
    assert len(manifests[0].splits["train"].shards) > 2
    assert manifests[0].digest == manifests[1].digest
    assert tree(tmp_path / "out1") == tree(tmp_path / "out2")
    assert not (tmp_path / "out1" / ".work").exists()


def test_sentences_are_never_cut(make_config: Any, tmp_path: Path) -> None:
    draw = random.Random(5)
    known = ["mask", "pad", "sep", "cls", "and", "stay", "text", "literal"]
    lines = [" ".join(draw.choices(known, k=draw.randint(2, 12))) for _ in range(80)]
    path = tmp_path / "sentences.txt"
    path.write_text("\n".join([*lines[:40], "", *lines[40:]]) + "\n")
    sources = [{"kind": "sentences", "path": str(path)}]
    config = make_config(sources=sources, row_length=16, validation=0)
    manifest = prepare(config)
    pieces = [p for found in read_back(config.output, manifest, "train").values() for p in found]
    whole = Counter(word for line in lines for word in line.split())
    assert Counter(word for piece in pieces for word in piece.split()) == whole
    # greedily joined lines, by hand
    expected: list[str] = []
    for part in (lines[:40], lines[40:]):
        held: list[str] = []
        for line in part:
            if len(" ".join([*held, line]).split()) > 14:
                expected.append(" ".join(held))
                held = []
            held.append(line)
        expected.append(" ".join(held))
    assert Counter(pieces) == Counter(expected)


def test_fraction_is_nested_and_independent_of_the_split(make_config: Any, tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("".join(f"text {'and ' * (i % 7)}{i}\n" for i in range(2000)))
    ids = {}
    for fraction in (0.25, 0.5):
        source = {"kind": "text", "path": str(path), "document": "line", "fraction": fraction}
        config = make_config(output=tmp_path / str(fraction), sources=[source])
        manifest = prepare(config)
        record = manifest.sources[0]
        assert abs(record.documents_kept / 2000 - fraction) < 0.04
        assert record.dropped["fraction"] == 2000 - record.documents_kept
        assert abs(record.documents_validation / record.documents_kept - 0.2) < 0.06
        ids[fraction] = {
            split: set(read_back(config.output, manifest, split)) for split in manifest.splits
        }
    for split in ("train", "validation"):
        assert ids[0.25][split] < ids[0.5][split]


def test_second_run_is_up_to_date(make_config: Any, tmp_path: Path) -> None:
    config = make_config()
    first = prepare(config)
    times = {path: path.stat().st_mtime_ns for path in config.output.rglob("*")}
    assert prepare(config.model_copy(update={"workers": 2})) == first
    os.utime(tmp_path / "texts" / "1.txt")  # a copy: same bytes, another time
    assert prepare(config) == first
    assert times == {path: path.stat().st_mtime_ns for path in config.output.rglob("*")}


def test_another_corpus_is_refused(make_config: Any, tmp_path: Path) -> None:
    config = make_config()
    prepare(config)
    before = tree(config.output)
    other = tmp_path / "other.txt"
    other.write_text((tmp_path / "vocab.txt").read_text() + "more\n")
    changes: list[tuple[dict[str, Any], str]] = [
        ({"row_length": 64}, "row_length: 32 there, 64 here"),
        ({"seed": 1}, "seed: 0 there, 1 here"),
        ({"tokenizer": str(other)}, "the tokenizer differs"),
        ({"tokenizer": {"train": {"vocab_size": 120}}}, "tokenizer: null there"),
    ]
    for change, message in changes:
        with pytest.raises(CorpusError, match=message) as caught:
            prepare(make_config(**change))
        assert "use another `output`" in str(caught.value)
    (tmp_path / "texts" / "2.txt").write_text("changed\n")
    with pytest.raises(CorpusError, match=r"input 2\.txt has changed"):
        prepare(config)
    (tmp_path / "texts" / "9.txt").write_text("new\n")
    with pytest.raises(CorpusError, match="6 input files there, 7 here"):
        prepare(config)
    assert tree(config.output) == before


def test_an_interrupted_run_is_cleared_and_foreign_files_are_not(make_config: Any) -> None:
    config = make_config()
    (config.output / ".work" / "rows").mkdir(parents=True)
    (config.output / ".work" / "rows" / "train-00000.arrow").write_text("half")
    (config.output / "train-00099.arrow").write_text("stale")
    manifest = prepare(config)
    assert verify(config.output) == []
    assert not (config.output / "train-00099.arrow").exists()
    (config.output / "manifest.json").unlink()
    with pytest.raises(CorpusError, match=r"but no manifest\.json"):
        prepare(config)
    foreign = make_config(output=config.output.parent / "foreign")
    (foreign.output / ".work").mkdir(parents=True)
    (foreign.output / "thesis.tex").write_text("precious")
    with pytest.raises(CorpusError, match=r"holds thesis\.tex"):
        prepare(foreign)
    assert (foreign.output / "thesis.tex").read_text() == "precious"
    assert manifest.splits["train"].rows


def test_nothing_to_train_on(make_config: Any) -> None:
    with pytest.raises(CorpusError, match=r"no training row: 60 documents read .60 too short"):
        prepare(make_config(min_characters=10_000))
    trained = {"train": {"vocab_size": 120}}
    with pytest.raises(CorpusError, match="no training row: 60 documents read"):
        prepare(make_config(min_characters=10_000, tokenizer=trained))
    assert list(prepare(make_config()).splits)  # a failed run leaves the way free


def test_a_large_vocabulary_takes_uint32(make_config: Any, tmp_path: Path) -> None:
    path = tmp_path / "large.txt"
    small = (tmp_path / "vocab.txt").read_text()
    for extra, dtype in ((65_536 - len(small.split()), "uint16"), (65_536, "uint32")):
        path.write_text(small + "".join(f"##{number}x\n" for number in range(extra)))
        config = make_config(tokenizer=str(path), output=tmp_path / dtype)
        assert prepare(config).dtype == dtype
        assert open_shards(config.output).rows([0]).dtype == dtype
        assert verify(config.output) == []


def test_smoothing_by_floats() -> None:
    special = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
    counts = np.array([10**9, 5, 7, 7, 0, 0, 1, 2, 1000, 123_456])
    table = smoothing(counts, special)
    assert table[:5] == [2**25 - 1] * 5
    assert max(table) == table[9] == 2**25 - 1
    scale = (2**25 - 1) / 123_456**0.7
    for id in range(5, 10):
        assert abs(table[id] - max(int(counts[id]), 1) ** 0.7 * scale) <= 0.51


def test_summary(make_config: Any) -> None:
    config = make_config()
    manifest = prepare(config)
    shown = summary(config.output, rows=2)
    assert shown["digest"] == manifest.digest
    assert shown["unknown"] == 0
    assert shown["splits"]["train"]["fill"] > 0.9
    texts = {document.id: " ".join(spaced(document.text)) for _, document in documents(config)}
    assert len(shown["rows"]) == 2
    for row in shown["rows"]:
        for segment in row["segments"]:
            assert segment["text"] in texts[segment["document"]]


def test_inputs_of_any_kind_of_content_give_one_digest(make_config: Any, tmp_path: Path) -> None:
    # neither the folder's name nor the output's is content
    first = prepare(make_config())
    (tmp_path / "texts").rename(tmp_path / "moved")
    moved = [{"kind": "text", "path": str(tmp_path / "moved"), "document": "paragraph"}]
    second = prepare(make_config(sources=moved, output=tmp_path / "elsewhere"))
    assert first.digest == second.digest


def double_or_fail(unit: int) -> int:
    if unit < 0:
        raise CorpusError(f"unit {unit}")
    if unit > 100:
        os._exit(1)  # as a kill for want of memory does
    return 2 * unit


@pytest.mark.parametrize("workers", [1, 2])
def test_engines(workers: int) -> None:
    assert run(double_or_fail, list(range(20)), workers) == [2 * unit for unit in range(20)]
    with pytest.raises(CorpusError, match="unit -1"):
        run(double_or_fail, [1, 2, -1, 3], workers)


def fail_or_write_late(path: str) -> None:
    if not path:
        raise CorpusError("the first failure")
    time.sleep(5)
    Path(path).touch()


def test_a_failure_does_not_wait_for_the_others(tmp_path: Path) -> None:
    late = tmp_path / "late"
    with pytest.raises(CorpusError, match="the first failure"):
        run(fail_or_write_late, [str(late), "", str(late)], 2)
    # `run` returns only when its workers are gone
    assert not late.exists() and not multiprocessing.active_children()


def test_a_dead_worker_is_a_sentence() -> None:
    with pytest.raises(CorpusError, match="a worker process died"):
        run(double_or_fail, [1, 101], 2)


FULL = """
import resource, sys
from data_prep.config import CorpusConfig
from data_prep.prepare import prepare
resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))
config = CorpusConfig.model_validate_json(sys.stdin.read())
try:
    prepare(config, part_bytes=2000)
except OSError as error:
    assert error.errno == 27 and error.filename, repr(error)
    sys.exit(2)
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_files_that_cannot_grow(make_config: Any, workers: int) -> None:
    config = make_config(workers=workers)
    code = subprocess.run(
        [sys.executable, "-c", FULL], input=config.model_dump_json().encode(), check=False
    ).returncode
    assert code == 2
    left = [path for path in config.output.rglob("*") if path.is_file()]
    assert [path.name for path in left] == ["lock"]
    assert prepare(config).splits["train"].rows


KILLED = """
import os, sys
from data_prep import prepare as stage
from data_prep.config import CorpusConfig
write = stage.finish
stage.finish = lambda *args: os._exit(9)
stage.prepare(CorpusConfig.model_validate_json(sys.stdin.read()))
"""


def test_a_killed_run_starts_again(make_config: Any, tmp_path: Path) -> None:
    config = make_config()
    code = subprocess.run(
        [sys.executable, "-c", KILLED], input=config.model_dump_json().encode(), check=False
    ).returncode
    assert code == 9
    with pytest.raises(CorpusError, match="no finished shards"):
        load_manifest(config.output)
    again = prepare(config)
    assert again.digest == prepare(make_config(output=tmp_path / "fresh")).digest
