"""Change files beside a tokenizer.json: they are refused, or read as by transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoTokenizer, BertTokenizerFast, RobertaTokenizerFast, __version__

from data_prep import CorpusError
from data_prep.config import JsonTokenizer
from data_prep.tokens import load

TEXTS = ["The Cat SAT on a Mat, caf\u00e9 \u00c9t\u00e9 \u4e2d\u6587 a-b.", "on  the x mat [a-b]"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
CONFIG, MAP = "tokenizer_config.json", "special_tokens_map.json"
ADDED = {"content": "zz", "lstrip": False, "rstrip": False, "normalized": False}
# What is refused: (file, key, value).
REFUSED: dict[str, list[tuple[str, str, Any]]] = {
    "bert": [
        (CONFIG, "do_lower_case", False),
        (CONFIG, "strip_accents", False),
        (CONFIG, "tokenize_chinese_chars", False),
        (CONFIG, "tokenizer_class", "RobertaTokenizer"),
        (CONFIG, "additional_special_tokens", ["a-b"]),
        (CONFIG, "extra_special_tokens", {"q": {"content": "a-b"}}),
        (CONFIG, "bos_token", "mat"),
        (CONFIG, "added_tokens_decoder", {"9": ADDED}),
        (MAP, "additional_special_tokens", ["a-b"]),
        ("added_tokens.json", "a-b", 401),
        ("tokenizer.json", "normalizer", None),
        ("tokenizer.json", "pre_tokenizer", None),
    ],
    "roberta": [
        (CONFIG, "add_prefix_space", True),
        (CONFIG, "tokenizer_class", "BertTokenizerFast"),
        (MAP, "mask_token", {"content": "x"}),
        ("tokenizer.json", "pre_tokenizer", None),
    ],
}
# What is read, or changes no text's tokens.
READ: list[tuple[str, str, Any]] = [
    *((CONFIG, key, value) for key, value in (
        ("do_lower_case", True), ("clean_text", False), ("trim_offsets", False),
        ("split_special_tokens", True), ("model_max_length", 8), ("padding_side", "left"),
        ("truncation_side", "left"), ("tokenizer_class", "PreTrainedTokenizerFast"),
        ("model_input_names", ["input_ids"]), ("clean_up_tokenization_spaces", True),
        ("never_split", ["a-b"]), ("do_basic_tokenize", False), ("from_slow", True),
        ("legacy", True), ("use_fast", False), ("errors", "ignore"), ("backend", "tokenizers"),
        ("auto_map", {"AutoTokenizer": ["x.Y", None]}), ("lowercase", True), ("max_length", 4),
        ("truncation_strategy", "longest_first"), ("stride", 2), ("pad_to_multiple_of", 8),
        ("add_bos_token", True), ("add_eos_token", True),
    )),
    ("config.json", "tokenizer_class", "RobertaTokenizer"),
    ("config.json", "model_type", "roberta"),
    ("tokenizer.json", "truncation", {"direction": "Right", "max_length": 4,
                                      "strategy": "LongestFirst", "stride": 0}),
    ("tokenizer.json", "decoder", None),
    ("chat_template.json", "chat_template", "x"),
    ("vocab.json", "<s>", 0),
]  # fmt: skip


@pytest.fixture(params=["bert", "roberta"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a folder as `save_pretrained` writes it."""
    kind, words = request.param, tmp_path / "words"
    words.mkdir()
    letters = [chr(code) for code in range(33, 127)]
    if kind == "bert":
        more = [*letters, *(f"##{c}" for c in letters), "cat", "mat", "on", "\u4e2d", "##\u6587"]
        lines = "\n".join(dict.fromkeys([*SPECIAL, *more]))
        (words / "vocab.txt").write_text(lines + "\n", encoding="utf-8")
        tokenizer: Any = BertTokenizerFast.from_pretrained(str(words))
    else:
        bpe = ByteLevelBPETokenizer()
        special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
        bpe.train_from_iterator(TEXTS * 3, vocab_size=400, special_tokens=special)
        bpe.save_model(str(words))
        tokenizer = RobertaTokenizerFast.from_pretrained(str(words))
    tokenizer.save_pretrained(tmp_path / kind)
    (tmp_path / kind / "config.json").write_text(json.dumps({"model_type": kind}))
    return tmp_path / kind


@contextmanager
def changed(folder: Path, file: str, key: str, value: Any) -> Iterator[None]:
    """Change a key of a file, and give it back as it was."""
    path = folder / file
    before = path.read_bytes() if path.exists() else None
    values = json.loads(before) if before else {}
    path.write_text(json.dumps({**values, key: value}), encoding="utf-8")
    yield
    if before is None:
        path.unlink()
    else:
        path.write_bytes(before)


def test_settings_that_contradict_are_refused(folder: Path) -> None:
    for file, key, value in REFUSED[folder.name]:
        with (
            changed(folder, file, key, value),
            pytest.raises(CorpusError, match=r"contradict each other"),
        ):
            load(folder)
    load(folder)


@pytest.mark.skipif(__version__ < "5", reason="version 4 reads tokenizer.json alone")
def test_other_settings_are_read_as_transformers_reads_them(folder: Path) -> None:
    for file, key, value in READ:
        with changed(folder, file, key, value):
            theirs = AutoTokenizer.from_pretrained(folder)
            ours = load(folder).backend
        for text in TEXTS:
            assert ours.encode(text).ids == theirs(text)["input_ids"][:], (file, key, value)


@pytest.mark.parametrize("folder", ["roberta"], indirect=True)
def test_the_advice_for_a_folder_without_tokenizer_json_can_be_followed(folder: Path) -> None:
    """Old folders of RoBERTa have vocab.json and merges.txt alone."""
    wanted = [load(folder).backend.encode(text).ids for text in TEXTS]
    for name in ("vocab.json", "merges.txt"):
        (folder / name).write_bytes((folder.parent / "words" / name).read_bytes())
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CorpusError, match=r"no tokenizer\.json and no vocab\.txt: write them"):
        load(folder)
    AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    assert [load(folder).backend.encode(text).ids for text in TEXTS] == wanted


@pytest.mark.skipif(__version__ < "5", reason="version 4 reads tokenizer.json alone")
@pytest.mark.parametrize("folder", ["bert"], indirect=True)
def test_other_forms_of_a_folder_are_compared_too(folder: Path) -> None:
    """Let a key be missing, whose default transformers takes; name the path; leave vocab.txt."""
    words = (folder.parent / "words" / "vocab.txt").read_bytes()
    with changed(folder, CONFIG, "do_lower_case", False), changed_case(folder):
        load(folder)  # both keep case
    settings = json.loads((folder / CONFIG).read_bytes())
    del settings["do_lower_case"]
    with changed_case(folder):
        (folder / CONFIG).write_text(json.dumps(settings))
        with refused("contradict each other"):
            load(folder)
    with changed(folder, CONFIG, "do_lower_case", False), refused("contradict each other"):
        load(JsonTokenizer(path=folder))
    load(JsonTokenizer(path=folder))
    (folder / CONFIG).write_text(json.dumps({**settings, "do_lower_case": True}))
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").write_bytes(words)
    load(folder)
    added = changed(folder, CONFIG, "additional_special_tokens", ["a-b"])
    with added, refused("contradict each other"):
        load(folder)
    for kind in ("BertJapaneseTokenizer", "RobertaTokenizer"):
        with changed(folder, CONFIG, "tokenizer_class", kind), refused("only BERT's is built"):
            load(folder)


def refused(text: str) -> Any:
    return pytest.raises(CorpusError, match=re.escape(text))


@contextmanager
def changed_case(folder: Path) -> Iterator[None]:
    """Let tokenizer.json keep case."""
    value = json.loads((folder / "tokenizer.json").read_bytes())["normalizer"]
    with changed(folder, "tokenizer.json", "normalizer", {**value, "lowercase": False}):
        yield
