"""Read back the output of the whole corpus stage, and compare it with its texts."""

import json
import os
import random
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from support.preparing import contents, lines_source, records_source
from support.reading import documents, read_all

from data_prep import CorpusError
from data_prep.duplicates import dedup
from data_prep.inspect import decoded
from data_prep.pipeline.smoothing import smoothing
from data_prep.prepare import prepare
from data_prep.shards import Manifest, load_manifest, open_shards, verify
from data_prep.shards.manifest import SpecialIds

SMALL_PARTS = 2_000  # bytes: several parts, units and shards from a few kB


def read_back(folder: Path, manifest: Manifest, split: str) -> dict[tuple[int, str], list[str]]:
    """Return the token strings by (source, document id), from rows and side tables alone."""
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
    """Return what WordPiece makes of words that are all in the vocabulary."""
    return text.replace("[", " [ ").replace("]", " ] ").lower().split()


@pytest.mark.parametrize("row_length", [16, 512])
def test_prepared_rows_decode_to_the_documents(make_config: Any, row_length: int) -> None:
    config = make_config(row_length=row_length)
    manifest = prepare(config, part_bytes=SMALL_PARTS)
    assert verify(config.output) == []
    splits = {name: read_back(config.output, manifest, name) for name in ("train", "validation")}
    assert not splits["train"].keys() & splits["validation"].keys()
    found = splits["train"] | splits["validation"]
    seen: set[str] = set()
    expected = {}
    for document in documents(read_all(config.sources[0])):
        if document.text not in seen:  # the first of equal texts survives
            expected[0, document.id] = spaced(document.text)
        seen.add(document.text)
    assert found.keys() == expected.keys()
    for key, segments in found.items():
        limit = row_length - 2
        words = expected[key]
        wanted = [words[start : start + limit] for start in range(0, len(words), limit)]
        assert Counter(segments) == Counter(" ".join(piece) for piece in wanted)
    counts = json.loads((config.output / "token_counts.json").read_text())["counts"]
    assert counts[manifest.tokenizer.special_ids.mask] == 0
    assert counts[manifest.tokenizer.special_ids.unk] == 0


def test_documents_in_are_kept_plus_dropped(make_config: Any, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "a.txt").write_bytes(
        b"fine words of text\n\xff\xfe broken\nx\n\na\0b\nfine words of text\n"
    )
    first = {"kind": "text", "path": str(tmp_path / "texts"), "document": "paragraph"}
    second = {"kind": "text", "path": str(bad), "document": "line", "name": "bad", "licence": "CC0"}
    config = make_config(sources=[first, second], min_characters=3)
    manifest = prepare(config)
    texts, lines = manifest.sources
    assert (texts.documents_in, texts.dropped) == (60, {"duplicate": 10})
    assert (texts.documents_kept, lines.documents_kept) == (50, 1)
    assert (lines.name, lines.licence, lines.documents_in) == ("bad", "CC0", 5)
    assert lines.dropped == {"binary": 1, "duplicate": 1, "not utf-8": 1, "too short": 1}
    assert lines.characters == len("fine words of text")
    quarantine = (config.output / "quarantine.jsonl").read_text(encoding="ascii").splitlines()
    assert [json.loads(line)["reason"] for line in quarantine] == ["not utf-8", "binary"]
    assert json.loads(quarantine[0])["source"] == "bad"


def test_documents_of_exactly_the_shortest_and_longest_length_are_kept(
    make_config: Any, tmp_path: Path
) -> None:
    source = records_source(tmp_path / "lengths.jsonl", ["a" * n for n in (4, 5, 9, 10)])
    config = make_config(sources=[source], min_characters=5, max_characters=9, max_unknown=1)
    (found,) = prepare(config).sources
    assert found.dropped == {"too short": 1, "too long": 1} and found.characters == 5 + 9


def test_the_first_source_keeps_a_duplicate(make_config: Any, tmp_path: Path) -> None:
    sources = [
        lines_source(tmp_path / "b.txt", ["mask and pad", "stay text"]),
        lines_source(tmp_path / "a.txt", ["stay text", "mask and pad", "sep"]),
    ]
    config = make_config(sources=sources, validation=0)
    manifest = prepare(config)
    assert [source.documents_kept for source in manifest.sources] == [2, 1]
    assert "validation" not in manifest.splits
    with pytest.raises(CorpusError, match="no validation split"):
        open_shards(config.output, "validation")


@pytest.mark.parametrize("train", [False, True])
def test_the_number_of_workers_does_not_change_bytes(
    make_config: Any, tmp_path: Path, train: bool
) -> None:
    changes = {"tokenizer": {"train": {"vocab_size": 120}}} if train else {"keep_text": True}
    manifests = [
        prepare(
            make_config(output=tmp_path / f"out{workers}", workers=workers, **changes),
            part_bytes=SMALL_PARTS,
        )
        for workers in (1, 2)
    ]
    assert len(manifests[0].splits["train"].shards) > 2
    assert manifests[0].digest == manifests[1].digest
    assert contents(tmp_path / "out1") == contents(tmp_path / "out2")
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
    lines = [f"text {'and ' * (i % 7)}{i}" for i in range(2000)]
    ids = {}
    for fraction in (0.25, 0.5):
        source = lines_source(tmp_path / "lines.txt", lines, fraction=fraction)
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


@pytest.mark.parametrize(
    ("documents", "validation", "held_out"),
    [(1, 0.5, 0), (1, 1e-9, 0), (2, 1e-9, 1), (2, 1 - 1e-9, 1), (9, 1e-9, 1), (9, 0, 0)],
)
def test_neither_split_is_left_empty(
    make_config: Any, tmp_path: Path, documents: int, validation: float, held_out: int
) -> None:
    lines = ["mask", "pad", "sep", "cls", "and", "stay", "text", "a", "]"][:documents]
    sources = [lines_source(tmp_path / "few.txt", lines)]
    (record,) = prepare(make_config(sources=sources, validation=validation)).sources
    assert (record.documents_kept, record.documents_validation) == (documents, held_out)


@pytest.mark.parametrize(("giants", "others"), [(1, 60), (1, 3), (0, 30), (10, 0), (10, 2)])
def test_a_document_above_the_share_is_trained_on_unless_others_are_too_small(
    make_config: Any, tmp_path: Path, known: list[str], giants: int, others: int
) -> None:
    """Compare the split of two files with the rule, written naively; the draws hold giants out."""
    choose, share = random.Random(8), 0.08
    for seed in range(3):
        texts = [" ".join(choose.choices(known, k=choose.randint(5, 40))) for _ in range(others)]
        while len(texts) < others + 2 * giants:
            giant = " ".join(choose.choices(known, k=3000))
            if dedup.draw(dedup.text_hash(giant), seed, "validation") < share or not others:
                texts[:0] = texts[len(texts) :] = [giant]  # and a duplicate
        kept = list(dict.fromkeys(texts))
        size = {text: len(text.encode()) for text in kept}
        draws = {t: dedup.draw(dedup.text_hash(t), seed, "validation") for t in kept}
        total, fits = sum(size.values()), list[str]()
        for text in sorted(kept, key=size.__getitem__):
            enough = sum(size[t] for t in fits) >= share * total
            half = 2 * size[text] > total and fits
            if size[text] <= share * total or not (enough or half):
                fits.append(text)
        fits = [t for t in kept if size[t] <= max(map(size.__getitem__, fits))]  # of one size all
        wanted = [t for t in fits if draws[t] < share] or [min(fits, key=draws.__getitem__)]
        half = len(texts) // 2
        parts = {"a.txt": texts[:half], "b.txt": texts[half:]}
        config = make_config(
            output=tmp_path / str(seed),
            sources=[lines_source(tmp_path / name, part) for name, part in parts.items()],
            seed=seed,
            validation=share,
            deduplicate={"documents": "exact"},
        )
        warned: list[str] = []
        held = read_back(config.output, prepare(config, warn=warned.append), "validation")
        assert sorted(" ".join(pieces) for pieces in held.values()) == sorted(wanted)
        if giants:
            largest = max(size.values()) / sum(size.values())
            (text,) = [text for text in warned if "held out; the largest document" in text]
            assert f"is {largest:.1%} of the text: cut it" in text
            assert others > 1 or "a.txt@0" in text


def test_short_texts_go_only_if_they_are_equal(make_config: Any, tmp_path: Path) -> None:
    choose = random.Random(9)
    things = [
        " ".join(f"{word}{n}" for word in ["a", "set", "of", "strong", "tools", "for", "wood"])
        for n in range(20)
    ]
    texts = [
        f"{thing} with a long handle and a case in {colour} of size {size}"
        for thing in things
        for colour in ("red", "blue")
        for size in range(5)
    ]
    lines = [*texts, *choose.sample(texts, 30)]
    sources = [lines_source(tmp_path / "products.txt", lines)]
    warned: list[str] = []
    (record,) = prepare(make_config(sources=sources), warn=warned.append).sources
    assert (record.documents_kept, record.dropped) == (200, {"duplicate": 30})
    assert not [text for text in warned if "near duplicates" in text]
    longer = lines_source(tmp_path / "long.txt", [f"now we also sell it {line}" for line in lines])
    config = make_config(sources=[longer], output=tmp_path / "long")
    (record,) = prepare(config, warn=warned.append).sources
    lost = record.dropped["near duplicate"]
    assert lost > 100
    (text,) = [text for text in warned if "near duplicates" in text]
    assert f"{lost} of 230 documents are dropped as near duplicates" in text
    assert "`deduplicate: {documents: exact}` keeps them" in text
    pairs = re.findall(r"as '(.*?)' is like '(.*?)'", text)
    assert len(pairs) == 3
    for pair in pairs:  # parts of two texts of one thing that differ
        ends = [[t for t in lines if part in f"now we also sell it {t}"] for part in pair]
        assert pair[0] != pair[1] and all(ends)


def test_a_cluster_of_near_duplicates_lies_in_one_split(make_config: Any, tmp_path: Path) -> None:
    draw = random.Random(6)
    texts = []
    for group in range(40):
        words = [f"{group}w{draw.randint(0, 9999)}" for _ in range(120)]
        for copy in range(3):  # two words in a row changed: Jaccard of 0.91
            words[40 * copy : 40 * copy + 2] = [f"x{group}{copy}", f"y{group}{copy}"]
            texts.append(" ".join(words))
    config = make_config(sources=[lines_source(tmp_path / "near.txt", texts)])
    (record,) = prepare(config).sources
    assert (record.documents_kept, record.dropped) == (40, {"near duplicate": 80})
    firsts = {
        id
        for split in ("train", "validation")
        for _, id in read_back(config.output, load_manifest(config.output), split)
    }
    offsets = [0]
    for text in texts[:-1]:
        offsets.append(offsets[-1] + len(text) + 1)
    assert firsts == {f"near.txt@{offset}" for offset in offsets[::3]}


def test_repeated_paragraphs_are_taken_out_of_later_documents(
    make_config: Any, tmp_path: Path, known: list[str]
) -> None:
    draw = random.Random(7)
    lines = [" ".join(draw.choices(known, k=20)) for _ in range(12)]
    documents = [
        [lines[0], "a", lines[1]],
        [lines[2], lines[0], "a"],  # lines[0] and the short line are known
        [lines[2], lines[0], "a"],  # a whole duplicate: goes as one
        [lines[1], lines[3]],
    ]
    sources = [records_source(tmp_path / "p.jsonl", ["\n".join(lines) for lines in documents])]
    changes = {"documents": "exact", "paragraphs": "exact"}
    config = make_config(sources=sources, validation=0, deduplicate=changes, row_length=128)
    (record,) = prepare(config).sources
    assert record.dropped == {"duplicate": 1}
    assert record.noted == {"repeated paragraphs taken out": 2}
    found = read_back(config.output, load_manifest(config.output), "train")
    kept = [[lines[0], "a", lines[1]], [lines[2], "a"], [lines[3]]]
    assert record.characters == sum(len("\n".join(d)) for d in kept)
    assert sorted(found.values()) == sorted([" ".join(d)] for d in kept)


def test_texts_of_evaluation_files_are_reported_and_removed(
    make_config: Any, tmp_path: Path, known: list[str]
) -> None:
    draw = random.Random(8)
    sentence = " ".join(draw.choices(known, k=14))
    dev = tmp_path / "dev.tsv"
    dev.write_text(f"sentence\tlabel\n{sentence.capitalize()}!\t1\n")
    lines = [" ".join(draw.choices(known, k=40)) for _ in range(5)]
    lines[2] = f"{lines[2]} {sentence} {lines[2]}"
    sources = [lines_source(tmp_path / "t.txt", lines)]
    for remove, kept in ((False, 5), (True, 4)):
        settings = {"files": [str(dev)], "remove": remove}
        out = tmp_path / str(remove)
        config = make_config(sources=sources, decontaminate=settings, output=out)
        (record,) = prepare(config).sources
        assert record.documents_kept == kept
        assert record.contaminated == {"dev.tsv": 1}
        assert record.dropped == ({"contaminated": 1} if remove else {})
        (entry,) = [json.loads(line) for line in (out / "contaminated.jsonl").open()]
        assert (entry["ngrams"], entry["files"], entry["removed"]) == (2, ["dev.tsv"], remove)
    dev.write_text(dev.read_text().replace(sentence[-8:], "another"))
    with pytest.raises(CorpusError, match=r"input dev\.tsv has changed"):
        prepare(config)


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
    before = contents(config.output)
    other = tmp_path / "other.txt"
    other.write_text((tmp_path / "vocab.txt").read_text() + "more\n")
    changes: list[tuple[dict[str, Any], str]] = [
        ({"row_length": 64}, "row_length: 32 there, 64 here"),
        ({"seed": 1}, "seed: 0 there, 1 here"),
        ({"row_length": [32, 64]}, "holds shards of one row length"),
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
    with pytest.raises(CorpusError, match="6 pieces of input there, 7 here"):
        prepare(config)
    assert contents(config.output) == before


def test_foreign_files_are_not_touched(make_config: Any) -> None:
    config = make_config()
    prepare(config)
    (config.output / "manifest.json").unlink()
    with pytest.raises(CorpusError, match=r"no part of an unfinished corpus"):
        prepare(config)
    foreign = make_config(output=config.output.parent / "foreign")
    (foreign.output / ".work").mkdir(parents=True)
    (foreign.output / "thesis.tex").write_text("precious")
    with pytest.raises(CorpusError, match=r"holds thesis\.tex"):
        prepare(foreign)
    assert (foreign.output / "thesis.tex").read_text() == "precious"


def test_a_folder_with_only_the_user_s_yaml_is_taken(make_config: Any) -> None:
    config = make_config()
    config.output.mkdir()
    (config.output / "corpus.yaml").write_text("# mine")
    prepare(config)
    assert (config.output / "corpus.yaml").read_text() == "# mine"
    assert prepare(config).digest == load_manifest(config.output).digest


def test_a_corpus_without_training_rows_is_refused(make_config: Any) -> None:
    for tokenizer in ({}, {"tokenizer": {"train": {"vocab_size": 120}}}):
        with pytest.raises(CorpusError, match=r"no training row: 60 documents read .60 too short"):
            prepare(make_config(min_characters=10_000, **tokenizer))
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


def test_smoothing_table_agrees_with_floats() -> None:
    special = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
    counts = np.array([10**9, 5, 7, 7, 0, 0, 1, 2, 1000, 123_456])
    table = smoothing(counts, special)
    assert table[:5] == [2**25 - 1] * 5
    assert max(table) == table[9] == 2**25 - 1
    scale = (2**25 - 1) / 123_456**0.7
    for id in range(5, 10):
        assert abs(table[id] - max(int(counts[id]), 1) ** 0.7 * scale) <= 0.51


def test_decoded_rows_are_the_texts(make_config: Any) -> None:
    config = make_config()
    prepare(config)
    shown = decoded(config.output, rows=2)
    found = documents(read_all(config.sources[0]))
    texts = {document.id: " ".join(spaced(document.text)) for document in found}
    assert len(shown) == 2
    for _, segments in shown:
        for segment in segments:
            assert segment.text in texts[segment.document]


def test_inputs_of_any_kind_of_content_give_one_digest(make_config: Any, tmp_path: Path) -> None:
    # neither the folder's name nor the output's is content
    first = prepare(make_config())
    (tmp_path / "texts").rename(tmp_path / "moved")
    moved = [{"kind": "text", "path": str(tmp_path / "moved"), "document": "paragraph"}]
    second = prepare(make_config(sources=moved, output=tmp_path / "elsewhere"))
    assert first.digest == second.digest


@pytest.mark.parametrize(
    ("share", "limit", "ends"),
    [(0.005, None, "quiet"), (0.05, None, "warned"), (0.3, None, "refused"), (0.3, 0.4, "warned")],
)
def test_many_unknown_tokens_are_warned_of_and_more_are_refused(
    share: float, limit: float | None, ends: str, tmp_path: Path, make_config: Any, known: list[str]
) -> None:
    """Write words that the vocabulary lacks: each is one unknown token."""
    draw = random.Random(1)
    lines = [
        " ".join("zzzz" if draw.random() < share else draw.choice(known) for _ in range(20))
        for _ in range(300)
    ]
    source = lines_source(tmp_path / "words.txt", lines)
    changes: dict[str, Any] = {"sources": [source], "max_unknown": 0.1 if limit is None else limit}
    config = make_config(**changes)
    said: list[str] = []
    if ends == "refused":
        with pytest.raises(CorpusError, match=r"of the tokens are unknown .*raise max_unknown"):
            prepare(config, warn=said.append)
        assert not (config.output / "manifest.json").exists()
        # The work is kept: with another limit it is only put together.
        prepare(make_config(**changes | {"max_unknown": 0.5}), warn=said.append)
        with pytest.raises(CorpusError, match="max_unknown"):
            prepare(config, warn=said.append)
        return
    prepare(config, warn=said.append)
    assert any("most often 'zzzz' " in line for line in said) == (ends == "warned")
    found = load_manifest(config.output).unknown
    assert (found is None) == (ends == "quiet")
    if found is not None:
        assert found.strings == {"zzzz": sum(line.count("zzzz") for line in lines)}
        assert found.share == pytest.approx(share, rel=0.2)


def test_a_source_that_gives_nothing_is_warned_of(make_config: Any, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("no\n")
    sources = [*make_config().model_dump()["sources"]]
    sources.append({"kind": "text", "path": str(tmp_path / "empty.txt"), "name": "small"})
    said: list[str] = []
    prepare(make_config(sources=sources, min_characters=5), warn=said.append)
    assert said == ["source small: none of its documents is in the corpus"]
