"""Test that a trained vocabulary keeps accents unless told otherwise, and a teacher's keeps its
rule.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.preparing import lines_source
from support.reading import real_files
from support.shard_folders import SPECIAL, reseal
from transformers import AutoTokenizer, BertTokenizer

from data_prep.config import CorpusConfig, TrainWordPiece
from data_prep.prepare import prepare
from data_prep.shards import load_manifest, verify
from data_prep.tokens import load
from data_prep.tokens.training import train_wordpiece
from launch.stages.prepare import corpus_lines

TEXT = "Einf\u00fcgen \u00dcBER caf\u00e9"


@pytest.fixture
def make_corpus(make_config: Any, tmp_path: Path) -> Callable[..., CorpusConfig]:
    """Return a function that prepares numbered documents of a line each."""

    def make(documents: list[str], warn: Any = None, **changes: Any) -> CorpusConfig:
        lines = [f"{document} {number}" for number, document in enumerate(documents)]
        sources = [lines_source(tmp_path / "texts.txt", lines)]
        config = make_config(sources=sources, deduplicate={"documents": "none"}, **changes)
        prepare(config, warn=warn or print)
        return config

    return make


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "einf\u00fcgen \u00fcber caf\u00e9"),
        ({"lowercase": False}, TEXT),
        ({"strip_accents": True}, "einfugen uber cafe"),
        ({"strip_accents": True, "lowercase": False}, "Einfugen UBER cafe"),
    ],
    ids=["default", "cased", "stripped", "cased and stripped"],
)
def test_case_and_accents_are_two_keys(settings: dict[str, Any], expected: str) -> None:
    trained = train_wordpiece(lambda: iter([TEXT] * 5), TrainWordPiece(vocab_size=200, **settings))
    assert trained.decode(trained.encode(TEXT)) == expected


@pytest.mark.parametrize(
    ("tokenizer", "said"),
    [
        ({"vocab_size": 200}, "lower-cases, keeps accents"),
        ({"vocab_size": 200, "strip_accents": True}, "lower-cases, strips accents"),
        ({"vocab_size": 200, "lowercase": False}, "keeps case, keeps accents"),
        ("vocab.txt", "lower-cases, strips accents"),
        ({"pattern": "[a-z]+"}, "keeps text as it is"),
        ({"pattern": "[a-z]+", "lowercase": True}, "Lowercase"),
    ],
    ids=["default", "stripped", "cased", "given", "pattern", "lower-case pattern"],
)
def test_screen_and_manifest_describe_the_normaliser(
    make_corpus: Any, tmp_path: Path, tokenizer: Any, said: str
) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL, "uber", "cafe"]) + "\n")
    if tokenizer == "vocab.txt":
        tokenizer = str(tmp_path / "vocab.txt")
    elif "pattern" in tokenizer:
        tokenizer["vocab"] = str(tmp_path / "vocab.txt")
    else:
        tokenizer = {"train": tokenizer}
    output = make_corpus([TEXT] * 20, tokenizer=tokenizer).output
    manifest = load_manifest(output)
    assert manifest.normaliser == said
    assert any(said in line for line in corpus_lines(output, manifest, "done"))
    assert verify(output) == []


def test_a_manifest_without_normaliser_is_still_valid(make_corpus: Any) -> None:
    """Check a manifest without the sentence: its own hash and its spelling hold."""
    output = make_corpus([TEXT] * 20, tokenizer={"train": {"vocab_size": 200}}).output
    before = load_manifest(output)
    reseal(output, normaliser="")
    assert "normaliser" not in json.loads((output / "manifest.json").read_text())
    after = load_manifest(output)
    assert before.normaliser and not after.normaliser and after.digest == before.digest
    assert verify(output) == []


TEXTS = (
    TEXT,
    "einfu\u0308gen na\u00efve \u1e69 \u00f8re \u0130stanbul \u00df",
    "\u4e2d\u6587 \ud55c\uad6d\uc5b4",
    "HELLO world",
)
LETTERS = "abcdefghijklmnopqrstuvwxyz\u00fc\u00e9\u00ef\u00f8\u1e69\u4e2d\u6587"


def teacher(folder: Path, upper: bool, **settings: Any) -> Path:
    """Write a teacher's folder as it was published: vocab.txt and settings."""
    letters = [*LETTERS, *(LETTERS.upper() if upper else "")]
    words = dict.fromkeys([*SPECIAL, *letters, *(f"##{letter}" for letter in letters)])
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))
    settings = {"tokenizer_class": "BertTokenizer", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def assert_same_ids(theirs: Any, spec: Path) -> None:
    """Check that the tokenizer read from `spec` gives the same ids as that of transformers."""
    ours = load(spec)
    for text in TEXTS:
        expected = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text).tolist() == expected, (spec.name, ascii(text))


@pytest.mark.parametrize("upper", [False, True], ids=["uncased", "cased"])
def test_a_given_vocabulary_has_the_teachers_rule(tmp_path: Path, upper: bool) -> None:
    folder = teacher(tmp_path, upper, do_lower_case=not upper)
    theirs = AutoTokenizer.from_pretrained(folder)
    theirs.save_pretrained(tmp_path / "saved")
    for spec in (folder / "vocab.txt", folder, tmp_path / "saved" / "tokenizer.json"):
        assert_same_ids(theirs, spec)


@pytest.mark.parametrize(
    "settings",
    [
        {"do_lower_case": True, "strip_accents": False},
        {"do_lower_case": False, "strip_accents": True},
        {"do_lower_case": True, "tokenize_chinese_chars": False},
    ],
    ids=["kept", "stripped", "joined"],
)
def test_a_teachers_folder_has_the_rule_of_its_settings(
    tmp_path: Path, settings: dict[str, bool]
) -> None:
    folder = teacher(tmp_path, True, **settings)
    assert_same_ids(AutoTokenizer.from_pretrained(folder), folder)


def test_the_published_vocabulary_has_the_published_rule(tmp_path: Path) -> None:
    for name, content in real_files("vocab.tar.xz", "vocab/bert-").items():
        (tmp_path / name).write_bytes(content)
    theirs = BertTokenizer(str(tmp_path / "bert-base-uncased-vocab.txt"), do_lower_case=True)
    for name in ("bert-base-uncased-vocab.txt", "bert-uncased-tokenizer.json"):
        assert_same_ids(theirs, tmp_path / name)
