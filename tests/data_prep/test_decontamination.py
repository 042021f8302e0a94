"""Compare evaluation text in documents with plain Python sets of 13 words."""

from __future__ import annotations

import bz2
import gzip
import json
import random
import re
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
    assert len(examples.hashes) == len(first)
    assert np.bincount(examples.files).tolist() == [
        list(first.values()).count(name) for name in examples.names
    ]
    for seed in range(100):  # two words only: some runs of 13 are there by chance
        text = sentence(60, seed=1000 + seed, vocabulary=2)
        hits = [first[gram] for gram in grams(text) if gram in first]
        assert overlap(examples, text) == (len(hits), tuple(sorted(set(hits))))


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
    assert len(examples.hashes) == 3000 * 28
    assert overlap(examples, sentence(300_000, seed=5000)) == (0, ())
    assert overlap(examples, "\n".join(lines))[0] == 3000 * 28  # none across two lines


def test_texts_and_those_too_short_to_be_found_are_counted(tmp_path: Path) -> None:
    rows = [
        f"{sentence(13, seed=1)}\tentailment\t7",  # labels and numbers are no texts
        f"{sentence(12, seed=2)}\ttwo words\t8",
        f"{sentence(14, seed=3)}\t{sentence(2, seed=4)}\t9",
    ]
    examples = build([written(tmp_path / "dev.tsv", "\n".join(rows))])
    assert (examples.num_texts, examples.num_short) == ((5,), (3,))
    assert len(examples.hashes) == 1 + 2


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
        found = list(read_examples(written(tmp_path / name, text)))
        assert found == STRINGS * (2 if name == "lines.json" else 1), name


def test_an_unpaired_quotation_mark_hides_no_row(tmp_path: Path) -> None:
    fields = ['a "quoted start', "1", "it 's \" here", "0", SENTENCE, "1", '"', "2"]
    text = "\n".join("\t".join(fields[i : i + 2]) for i in range(0, 8, 2))
    for name in ("dev.tsv", "sts-dev.csv"):  # STS-B has tabs in a .csv
        for end in ("\n", "\r\n"):
            path = written(tmp_path / name, text.replace("\n", end))
            assert list(read_examples(path)) == fields
    # in a true .csv such a mark swallows the rest, whose words stay in order
    lines = ['"open,1', *(f"{sentence(20, seed=n)},{n}" for n in range(1500))]
    examples = build([written(tmp_path / "open.csv", "\n".join(lines))])
    assert overlap(examples, sentence(20, seed=1499))[0] == 8


def test_csv_fields_may_be_quoted_long_and_of_several_lines(tmp_path: Path) -> None:
    long = sentence(40_000, seed=1)  # beyond the csv module's usual limit of 131,072
    text = f'id,text\r\n1,"a ""b"", c\nd"\r\n2,{long}\r\n'
    expected = ["id", "text", "1", 'a "b", c\nd', "2", long]
    assert list(read_examples(written(tmp_path / "a.csv", text))) == expected


def test_compressed_files_read_like_plain_ones(tmp_path: Path) -> None:
    raw = f"{SENTENCE}\nsecond\u2028line".encode()
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(raw))
    (tmp_path / "a.TXT.bz2").write_bytes(bz2.compress(raw))
    for name in ("a.txt.gz", "a.TXT.bz2"):
        assert list(read_examples(tmp_path / name)) == [SENTENCE, "second\u2028line"]


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
        ("short.tsv", b"sentence\tlabel\nall of it is short\t1", "no text of 13 words or more"),
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
    for field in ("names", "num_texts", "num_short"):
        assert getattr(loaded, field) == getattr(examples, field)
    assert (loaded.hashes == examples.hashes).all() and (loaded.files == examples.files).all()
    assert overlap(loaded, sentence(50, seed=2)) == (38, ("2.txt",))


def test_load_refuses_files_that_save_did_not_write(
    tmp_path: Path, planted: Contamination, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").write_bytes(b"\x80\x04}q\x00." * 9)
    monkeypatch.setattr(decontamination, "ALGORITHM", "13-grams 0")
    save(planted, tmp_path / "old")
    monkeypatch.undo()
    for name, problem in (
        ("other", "no index of evaluation files"),
        ("none", "no index of evaluation files"),
        ("old", "another version"),
    ):
        with pytest.raises(CorpusError, match=f"{name}: .*{problem}"):
            load(tmp_path / name)
