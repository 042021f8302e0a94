"""Tokenizers: literal special tokens stay text, and every spelling of one gives the same ids."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data_prep import CorpusError
from data_prep.config import VocabularyTokenizer
from data_prep.tokens import Tokens, load, pieces

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [*SPECIAL, "[", "]", "mask", "sep", "pad", "hello", "world", "##s", ",", "e"]
SMILES = r"\[[^\]]+\]|Br|Cl|[BCNOFSPI]|[cnos]|[()=#.>+-]|\d"
TEXT = "Hello worlds, [MASK] hello [SEP] [PAD]"


def write_vocabulary(folder: Path, tokens: list[str], name: str = "vocab.txt") -> Path:
    path = folder / name
    path.write_text("\n".join(tokens) + "\n", encoding="utf-8")
    return path


def shown(tokens: Tokens, text: str) -> list[str]:
    return [tokens.vocabulary[id] for id in tokens.encode(text)]


def test_word_piece_by_hand(tmp_path: Path) -> None:
    tokens = load(write_vocabulary(tmp_path, WORDS))
    expected = ["hello", "world", "##s", ",", "[", "mask", "]", "hello", "[", "sep", "]"]
    assert shown(tokens, TEXT) == [*expected, "[", "pad", "]"]
    assert shown(tokens, "h\u00e9llo \u00e9 zzz") == ["hello", "e", "[UNK]"]
    assert tokens.special_ids.model_dump() == {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
    assert tokens.encode("").tolist() == []


def test_case_follows_the_vocabulary(tmp_path: Path) -> None:
    cased = load(write_vocabulary(tmp_path, [*WORDS, "Hello"]))
    assert shown(cased, "Hello hello HELLO") == ["Hello", "hello", "[UNK]"]
    # U+1D2C is upper-case and has no lower case; bert-base-uncased has its like
    uncased = load(write_vocabulary(tmp_path, [*WORDS, "\u1d2c"]))
    assert shown(uncased, "Hello hello HELLO") == ["hello"] * 3


def test_a_pattern_that_matches_mask_gives_no_mask(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path, [*SPECIAL, "C", "Cl", "[C@H]", "(", ")", ">"])
    tokens = load(VocabularyTokenizer(vocab=path, pattern=SMILES))
    assert shown(tokens, "CCl([C@H])") == ["C", "Cl", "(", "[C@H]", ")"]
    assert shown(tokens, "C[MASK]C [SEP]>x") == ["C", "[UNK]", "C", "[UNK]", ">", "[UNK]"]


@pytest.mark.parametrize("pattern", [None, SMILES])
def test_a_saved_folder_is_the_same_tokenizer(tmp_path: Path, pattern: str | None) -> None:
    from transformers import AutoTokenizer

    vocabulary = write_vocabulary(tmp_path, [*WORDS, "C", "Cl"])
    tokens = load(VocabularyTokenizer(vocab=vocabulary, pattern=pattern, lowercase=False))
    tokens.save(tmp_path / "saved", 32)
    again = load(tmp_path / "saved")
    assert again.record() == tokens.record()
    assert again.encode(TEXT).tolist() == tokens.encode(TEXT).tolist()
    theirs = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert theirs("hello C Cl").input_ids == [2, *tokens.encode("hello C Cl").tolist(), 3]
    assert (theirs.pad_token_id, theirs.mask_token_id, theirs.model_max_length) == (0, 4, 32)
    assert (tmp_path / "saved" / "vocab.txt").read_text() == vocabulary.read_text()
    assert shown(load(tmp_path / "saved" / "tokenizer.json"), TEXT) == shown(tokens, TEXT)


def test_long_texts_are_cut_before_whitespace(tmp_path: Path) -> None:
    text = "hello world, " * 20_000  # 260,000 characters
    parts = list(pieces(text))
    assert "".join(parts) == text
    assert len(parts) == 3 and all(len(part) <= 100_000 for part in parts)
    assert all(part[0] == " " for part in parts[1:])
    tokens = load(write_vocabulary(tmp_path, WORDS))
    whole = tokens.backend.encode(text, add_special_tokens=False).ids
    batch = tokens.encode_batch(["hello", text, "", text])
    assert [ids.tolist() for ids in batch] == [[10], whole, [], whole]
    assert list(pieces("x" * 25, 10)) == ["x" * 10, "x" * 10, "x" * 5]


@pytest.mark.parametrize(
    ("tokens", "pattern", "message"),
    [
        (["[PAD]", "[UNK]", "a"], None, r"no \[CLS\], \[SEP\], \[MASK\]"),
        ([*SPECIAL, "a", "b", "a"], None, "lines 6 and 8 are both 'a'"),
        ([*SPECIAL, "", "b"], None, "line 6 is empty"),
        ([], None, "line 1 is empty"),
        ([*SPECIAL, "a"], "(a", "not a regex"),
        ([*SPECIAL, "a"], "", "not a regex"),
    ],
)
def test_unusable_vocabularies(
    tmp_path: Path, tokens: list[str], pattern: str | None, message: str
) -> None:
    path = write_vocabulary(tmp_path, tokens)
    with pytest.raises(CorpusError, match=message) as caught:
        load(VocabularyTokenizer(vocab=path, pattern=pattern))
    assert "\n" not in str(caught.value)


def test_unusable_files(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="no such tokenizer"):
        load(str(tmp_path / "vocab.txt"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CorpusError, match=r"not a tokenizer\.json"):
        load(str(tmp_path))
    with pytest.raises(CorpusError, match="cannot be read"):
        load(VocabularyTokenizer(vocab=tmp_path / "none.txt"))


def test_special_tokens_go_by_the_name_of_the_folder(tmp_path: Path) -> None:
    names = {"pad": "<pad>", "unk": "<unk>", "cls": "<s>", "sep": "</s>", "mask": "<mask>"}
    load(write_vocabulary(tmp_path, [*WORDS, "x"])).save(tmp_path / "saved", 16)
    state = (tmp_path / "saved" / "tokenizer.json").read_text()
    settings = json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())
    for key, name in names.items():
        state = state.replace(f"[{key.upper()}]", name)
        settings[f"{key}_token"] = {"content": name}
    (tmp_path / "saved" / "tokenizer.json").write_text(state)
    (tmp_path / "saved" / "tokenizer_config.json").write_text(json.dumps(settings))
    tokens = load(tmp_path / "saved")
    assert tokens.special_ids.mask == 4
    assert 4 not in tokens.encode("hello <mask> </s>")
    with pytest.raises(CorpusError, match=r"no \[PAD\], \[UNK\]"):
        load(tmp_path / "saved" / "tokenizer.json")


TRAIN = """
import random, sys
from data_prep.config import TrainWordPiece
from data_prep.vocabulary import train
draw = random.Random(0)
letters = "abcdefghij\\u00e9\\u4e2d"
words = ["".join(draw.choices(letters, k=draw.randint(1, 9))) for _ in range(400)]
texts = [" ".join(draw.choices(words, k=50)) for _ in range(100)]
print("\\n".join(train(lambda: iter(texts), TrainWordPiece(vocab_size=300)).vocabulary))
"""


def test_training_twice_gives_one_vocabulary(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONIOENCODING": "utf-8"}
    runs = [
        subprocess.run(
            [sys.executable, "-c", TRAIN], capture_output=True, check=True, env=environment
        ).stdout.decode()
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    vocabulary = runs[0].split()
    assert len(vocabulary) == 300
    assert vocabulary[:5] == SPECIAL
    assert vocabulary[5:10] == ["a", "b", "c", "d", "e"]  # \u00e9 is e once lower-cased
    assert any(len(token) > 3 for token in vocabulary[5:])
    assert np.unique(vocabulary).size == 300
