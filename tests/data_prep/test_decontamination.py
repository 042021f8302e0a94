"""Compare evaluation text in documents with plain Python sets of 13 words."""

from __future__ import annotations

import bz2
import gzip
import json
import random
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep import CorpusError
from data_prep.duplicates import decontamination
from data_prep.duplicates.decontamination import Contamination, build, load, read_examples, save
from data_prep.duplicates.minhash import word_hashes
from data_prep.text.cleaning import clean

SENTENCE = "The committee that met on Tuesday couldn't agree, so its chair postponed every vote."
WORDS = re.findall(r"\w+", SENTENCE)  # 15: couldn, t


def sentence(words: int, seed: int, vocabulary: int = 5000) -> str:
    source = random.Random(seed)
    return " ".join(f"w{source.randrange(vocabulary)}" for _ in range(words))


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def overlap(examples: Contamination, text: str) -> tuple[int, tuple[str, ...]]:
    return examples.overlap(word_hashes(text))


@pytest.fixture
def planted(tmp_path: Path) -> Contamination:
    """Return the index of one file with SENTENCE in it."""
    return build([written(tmp_path / "dev.tsv", f"sentence\tlabel\n{SENTENCE}\t1\n")])


def test_thirteen_words_of_an_example_are_found_and_twelve_are_not(planted: Contamination) -> None:
    around = sentence(200, seed=1)
    assert len(WORDS) == 15
    for first in range(15):
        for end in range(first + 1, 16):
            text = f"{around} {' '.join(WORDS[first:end])} {around}"
            expected = max(0, end - first - 12)
            assert overlap(planted, text) == (expected, ("dev.tsv",) if expected else ())


def test_overlap_ignores_case_punctuation_and_spacing(planted: Contamination) -> None:
    for text in (
        SENTENCE.upper(),
        "\n".join(WORDS),
        f"({SENTENCE.replace(' ', '  -- ')})",
        SENTENCE.replace("'", "\u2019").replace(" ", "\u00a0"),
        SENTENCE.replace("couldn't", "couldn 't"),
    ):
        assert overlap(planted, text) == (3, ("dev.tsv",))
    assert overlap(planted, SENTENCE.replace("chair", "chairs")) == (0, ())


def test_examples_are_cleaned_as_documents_are(tmp_path: Path) -> None:
    # decomposed accents, soft hyphens and marks of direction, which `clean` takes out of documents
    dirty = SENTENCE.replace("vote", "cafe\u0301").replace("committee", "com\u00admit\u200etee")
    examples = build([written(tmp_path / "dev.txt", dirty)])
    assert overlap(examples, clean(dirty))[0] == 3
    assert overlap(examples, SENTENCE.replace("vote", "caf\u00e9"))[0] == 3


def test_counts_and_files_agree_with_plain_sets_of_13_words(tmp_path: Path) -> None:
    texts = [[sentence(20 + n, seed=10 * f + n, vocabulary=2) for n in range(30)] for f in range(3)]
    files = [
        written(tmp_path / task / "dev.tsv", "\n".join(lines))
        for task, lines in zip("ABC", texts, strict=True)
    ]

    def grams(text: str) -> list[tuple[str, ...]]:
        words = text.split()
        return [tuple(words[i : i + 13]) for i in range(len(words) - 12)]

    first: dict[tuple[str, ...], str] = {}
    for name, lines in zip(("A/dev.tsv", "B/dev.tsv", "C/dev.tsv"), texts, strict=True):
        for line in lines:
            for gram in grams(line):
                first.setdefault(gram, name)
    examples = build(files)
    assert examples.sizes == (13, 13, 13) and list(examples.by_length) == [13]
    index = examples.by_length[13]
    assert len(index.hashes) == len(first)
    assert np.bincount(index.files).tolist() == [
        list(first.values()).count(name) for name in examples.names
    ]
    for seed in range(100):  # two words only: some runs of 13 are there by chance
        text = sentence(60, seed=1000 + seed, vocabulary=2)
        hits = [first[gram] for gram in grams(text) if gram in first]
        assert overlap(examples, text) == (len(hits), tuple(sorted(set(hits))))


@pytest.mark.parametrize("words", [2, 4, 5, 7, 8, 10, 13, 30])
def test_a_short_example_is_found_as_a_whole_from_five_words_on(words: int, tmp_path: Path) -> None:
    lines = [sentence(words, seed=n) for n in range(40)] + [sentence(20, seed=99)]
    examples = build([written(tmp_path / "dev.txt", "\n".join(lines))])
    assert examples.sizes == (min(max(words, 8), 13),)
    around = sentence(50, seed=1000)
    for line in lines[:40]:
        count, names = overlap(examples, f"{around} {line.upper()}! {around}")
        assert (count > 0, names) == ((True, ("dev.txt",)) if words >= 5 else (False, ()))
        if words > 5:  # a part of a short text is no match
            cut = " ".join(line.split()[: min(words, 13) - 1])
            assert overlap(examples, f"{around} {cut} {around}") == (0, ())
    assert examples.num_short == (40 if words < 5 else 0,)


def test_the_texts_of_an_example_are_joined(tmp_path: Path) -> None:
    """Find a run of words over two fields, and each field alone."""
    rows = [f"7\t{sentence(7, seed=n)}\t{sentence(9, seed=n + 500)}\tyes" for n in range(50)]
    examples = build([written(tmp_path / "dev.tsv", "\n".join(rows))])
    assert examples.sizes == (13,) and examples.num_texts == (100,)
    for row in rows:
        _, first, second, _ = row.split("\t")
        assert overlap(examples, first) == overlap(examples, second) == (1, ("dev.tsv",))
        assert overlap(examples, f"{first} {second}")[0] == 4 + 2
        assert overlap(examples, f"{second} {first}")[0] == 2


@pytest.mark.parametrize(
    ("name", "bound"), [("STS-B/dev.csv", 0.03), ("SST-2/train.tsv", 0.35), ("RTE/dev.tsv", 0.03)]
)
def test_nearly_every_text_of_glue_can_be_found(name: str, bound: float, tmp_path: Path) -> None:
    """Count the texts that are found when they stand in a document, next to 13-grams of a field."""
    archive = Path(__file__).parents[3] / "shared" / "data" / "glue.tar.xz"
    if not archive.is_file():
        pytest.skip(f"{archive} is not here: it holds files of GLUE")
    subprocess.run(["tar", "xJf", archive, "-C", tmp_path], check=True)
    task, file = name.split("/")
    (path,) = [p for p in tmp_path.rglob(f"*{Path(file).suffix}") if is_split(p, task, file)]
    examples = build([path])
    texts = [t for fields in read_examples(path) for t in fields if len(clean(t).split()) > 1]
    texts = texts[:3000]
    missed = sum(not overlap(examples, clean(text))[0] for text in texts) / len(texts)
    thirteen = sum(len(word_hashes(clean(text))) < 13 for text in texts) / len(texts)
    short = examples.num_short[0] / examples.num_texts[0]
    print(f"{name}: {missed:.1%} missed, {short:.1%} too short, {thirteen:.1%} with 13-grams")
    assert missed < bound and missed == pytest.approx(short, abs=0.03)
    assert missed < thirteen / 2


def is_split(path: Path, task: str, file: str) -> bool:
    text = str(path).lower()
    return task.lower().replace("-", "") in text.replace("-", "") and Path(file).stem in path.stem


def test_a_long_document_in_slices_is_as_in_one_go(
    planted: Contamination, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decontamination, "_SLICE", 7)
    for before in range(30):
        text = f"{sentence(before, seed=2)} {SENTENCE} {sentence(20, seed=3)}"
        assert overlap(planted, text)[0] == 3


def test_random_text_hits_nothing_and_everything_in_a_file_is_found(tmp_path: Path) -> None:
    lines = [sentence(40, seed=n) for n in range(3000)]
    examples = build([written(tmp_path / "many.txt", "\n".join(lines))])
    assert len(examples.by_length[13].hashes) == 3000 * 28
    assert overlap(examples, sentence(300_000, seed=5000)) == (0, ())
    assert overlap(examples, "\n".join(lines))[0] == 3000 * 28  # none across two lines


def test_texts_and_those_too_short_to_be_found_are_counted(tmp_path: Path) -> None:
    rows = [
        f"{sentence(13, seed=1)}\tnot_entailment\t5.000",  # labels and numbers are no texts
        "2012-01-05 10:11:12\thttps://en.example.org/wiki/List_of_towns_in_Europe\t7",
        f"{sentence(12, seed=2)}\ttwo words\t8",
        f"{sentence(14, seed=3)}\t{sentence(4, seed=4)}\t9",
    ]
    examples = build([written(tmp_path / "dev.tsv", "\n".join(rows))])
    assert (examples.num_texts, examples.num_short) == ((5,), (2,))
    assert {n: len(index.hashes) for n, index in examples.by_length.items()} == {
        12: 1,
        13: 1 + 2 + 6,
    }


SQUAD: dict[str, Any] = {
    "version": "1.1",
    "data": [
        {
            "title": "A title",
            "paragraphs": [
                {
                    "context": "The context\nin \u00e9lan.",
                    "qas": [
                        {
                            "id": "56be4db0acb8001400a502ec",
                            "question": "Which one?",
                            "answers": [{"text": "in \u00e9lan", "answer_start": 12}],
                            "is_impossible": False,
                            "plausible_answers": None,
                        }
                    ],
                }
            ],
        }
    ],
}
STRINGS = [
    *("1.1", "A title", "The context\nin \u00e9lan.", "56be4db0acb8001400a502ec"),
    *("Which one?", "in \u00e9lan"),
]


def test_json_gives_every_string_at_any_depth(tmp_path: Path) -> None:
    for name, text in (
        ("dev.json", json.dumps(SQUAD, indent=1)),
        ("bom.json", "\ufeff" + json.dumps(SQUAD, ensure_ascii=False)),
        ("lines.jsonl", json.dumps(SQUAD) + "\n\n"),
        ("lines.json", "\n".join(json.dumps(SQUAD) for _ in range(2))),
    ):
        found = [
            text for fields in read_examples(written(tmp_path / name, text)) for text in fields
        ]
        assert found == STRINGS * (2 if name == "lines.json" else 1), name


def test_an_unpaired_quotation_mark_hides_no_row(tmp_path: Path) -> None:
    fields = ['a "quoted start', "1", "it 's \" here", "0", SENTENCE, "1", '"', "2"]
    text = "\n".join("\t".join(fields[i : i + 2]) for i in range(0, 8, 2))
    for name in ("dev.tsv", "sts-dev.csv"):  # STS-B has tabs in a .csv
        for end in ("\n", "\r\n"):
            path = written(tmp_path / name, text.replace("\n", end))
            assert [field for row in read_examples(path) for field in row] == fields
    # in a true .csv such a mark swallows the rest: then each line is a row
    lines = ['"open,1', *(f"{sentence(20, seed=n)},{n}" for n in range(1500))]
    examples = build([written(tmp_path / "open.csv", "\n".join(lines))])
    assert overlap(examples, sentence(20, seed=1499))[0] == 8
    short = [sentence(6, seed=n) for n in range(60)]
    marked = [f'"{text},1' if n in (5, 50) else f"{text},1" for n, text in enumerate(short)]
    examples = build([written(tmp_path / "two.csv", "\n".join(marked))])
    assert all(overlap(examples, f"so {text} it is") for text in short)


def test_csv_fields_may_be_quoted_long_and_of_several_lines(tmp_path: Path) -> None:
    long = sentence(40_000, seed=1)  # beyond the csv module's usual limit of 131,072
    text = f'id,text\r\n1,"a ""b"", c\nd"\r\n2,{long}\r\n'
    expected = ["id", "text", "1", 'a "b", c\nd', "2", long]
    found = read_examples(written(tmp_path / "a.csv", text))
    assert [field for row in found for field in row] == expected


def test_compressed_files_read_like_plain_ones(tmp_path: Path) -> None:
    raw = f"{SENTENCE}\nsecond\u2028line".encode()
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(raw))
    (tmp_path / "a.TXT.bz2").write_bytes(bz2.compress(raw))
    for name in ("a.txt.gz", "a.TXT.bz2"):
        assert list(read_examples(tmp_path / name)) == [[SENTENCE], ["second\u2028line"]]


@pytest.mark.parametrize(
    ("name", "raw", "problem"),
    [
        ("no.tsv", None, "cannot be read: No such file"),
        ("empty.tsv", b" \n\n", "empty"),
        ("binary.tsv", b"a\0b", "binary"),
        ("latin.tsv", b"caf\xe9", "not UTF-8"),
        ("a.parquet", b"PAR1", "must end in one of .tsv, .csv, .json, .jsonl, .txt"),
        ("cut.json", b'{"a": "b', "not a .json file"),
        ("cut.jsonl", b'{"a": "b"}\n{"a"', "not a .jsonl file (line 2: "),
        ("deep.json", b"[" * 200_000, "not a .json file"),
        ("cut.txt.gz", gzip.compress(b"words " * 99)[:-9], "cut short or damaged"),
        ("short.tsv", b"sentence\tlabel\nall is short\t1", "no text of 5 words or more"),
    ],
)
def test_errors_name_an_unusable_file(
    tmp_path: Path, name: str, raw: bytes | None, problem: str
) -> None:
    path = tmp_path / name
    if raw is not None:
        path.write_bytes(raw)
    good = written(tmp_path / "good.txt", SENTENCE)
    with pytest.raises(CorpusError) as caught:
        build([good, path])
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and problem in message and "\n" not in message


def test_a_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decontamination, "LIMIT", 1 << 20)
    path = tmp_path / "bomb.txt.gz"
    path.write_bytes(gzip.compress(bytes(3 << 20)))
    with pytest.raises(CorpusError, match=r"bomb\.txt\.gz: more than 1 MiB"):
        list(read_examples(path))


def test_saved_and_loaded_is_the_same_and_the_same_bytes(tmp_path: Path) -> None:
    files = [written(tmp_path / f"{n}.txt", sentence(50, seed=n)) for n in range(3)]
    examples = build(files)
    for name in ("a", "b"):
        save(build(files), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    loaded = load(tmp_path / "a")
    for field in ("names", "sizes", "num_texts", "num_short"):
        assert getattr(loaded, field) == getattr(examples, field)
    assert loaded.by_length.keys() == examples.by_length.keys()
    for length, index in examples.by_length.items():
        for ours, theirs in zip(index, loaded.by_length[length], strict=True):
            assert (ours == theirs).all()
    assert overlap(loaded, sentence(50, seed=2)) == (38, ("2.txt",))
