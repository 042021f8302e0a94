"""Test that special tokens in text stay text, and that all backends give the same ids."""

import json
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.processes import python
from support.shard_folders import SPECIAL
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import RobertaProcessing, TemplateProcessing
from tokenizers.trainers import BpeTrainer, UnigramTrainer
from transformers import AutoTokenizer

from data_prep import CorpusError
from data_prep.config import JsonTokenizer, TrainTokenizer, VocabularyTokenizer
from data_prep.messages import extra
from data_prep.tokens import Tokens, load, word_piece
from data_prep.tokens.tokenizer import calls, split_text
from data_prep.tokens.training import train_tokenizer

WORDS = [*SPECIAL, "[", "]", "mask", "sep", "pad", "hello", "world", "##s", ",", "e"]
SMILES = r"\[[^\]]+\]|Br|Cl|[BCNOFSPI]|[cnos]|[()=#.>+-]|\d"
TEXT = "Hello worlds, [MASK] hello [SEP] [PAD]"
# The special tokens by the keys of their settings.
BERT = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
ROBERTA = {"pad": "<pad>", "unk": "<unk>", "cls": "<s>", "sep": "</s>", "mask": "<mask>"}


def write_vocabulary(folder: Path, tokens: list[str]) -> Path:
    path = folder / "vocab.txt"
    path.write_text("\n".join(tokens) + "\n", encoding="utf-8")
    return path


def shown(tokens: Tokens, text: str) -> list[str]:
    return [tokens.vocabulary[id] for id in tokens.encode(text)]


@pytest.fixture(params=["tokenizers", "nanotoken"])
def backend(request: pytest.FixtureRequest) -> Any:
    """Return a function from a tokenizer to itself, on the backend of this run."""
    if request.param == "tokenizers":
        return lambda tokens: tokens
    pytest.importorskip("nanotoken", reason="needs the extra `fast`")
    return accelerated


def accelerated(tokens: Tokens) -> Tokens:
    assert tokens.accelerate() == ""
    return tokens


def test_word_piece_by_hand(tmp_path: Path, backend: Any) -> None:
    tokens = backend(load(write_vocabulary(tmp_path, WORDS)))
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


def test_a_bare_vocabulary_separates_chinese_characters(tmp_path: Path) -> None:
    tokens = load(write_vocabulary(tmp_path, [*WORDS, "\u4e2d", "\u6587"]))
    assert shown(tokens, "hello\u4e2d\u6587world") == ["hello", "\u4e2d", "\u6587", "world"]


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


def test_long_texts_are_cut_before_whitespace(tmp_path: Path, backend: Any) -> None:
    text = "hello world, " * 20_000  # 260,000 characters
    parts = list(split_text(text))
    assert "".join(parts) == text
    assert len(parts) == 3 and all(len(part) <= 100_000 for part in parts)
    assert all(part[0] == " " for part in parts[1:])
    tokens = backend(load(write_vocabulary(tmp_path, WORDS)))
    whole = tokens.backend.encode(text, add_special_tokens=False).ids
    batch = tokens.encode_batch(["hello", text, "", *[text] * 5, "world"])
    assert [ids.tolist() for ids in batch] == [[10], whole, [], *[whole] * 5, [11]]
    assert tokens.encode_batch([]) == []


@pytest.mark.parametrize("limit", [1, 2, 7, 1000, 100_000])
def test_pieces_are_the_text_and_calls_are_bounded(limit: int) -> None:
    texts = ["", "x", "x" * 2500, "a b" * 900, "x" * 15_000 + " y" * 50_000, "\u4e2d" * 3000]
    for text in texts:
        parts = list(split_text(text, limit))
        assert "".join(parts) == text
        assert max(map(len, parts)) <= limit
        assert all(parts) or text == ""
    texts *= 9
    made = list(calls(texts))
    assert all(sum(len(piece) for _, piece in call) <= 1_000_000 for call in made)
    assert len(made) == 2  # 1.1 million characters
    joined = [
        "".join(piece for call in made for number, piece in call if number == wanted)
        for wanted in range(len(texts))
    ]
    assert joined == texts


MILLION = {
    "a word of a million": "x" * 1_000_000,
    "and 50 more": "x" * 1_000_050,
    "accents": "e\u0301" * 500_000,
    "before and after": "hello " + "e" * 1_000_050 + ", world",
}


@pytest.mark.parametrize("text", MILLION.values(), ids=MILLION)
def test_a_million_letters_are_unknown_tokens(tmp_path: Path, backend: Any, text: str) -> None:
    # No cut leaves a rest that is short enough for WordPiece to read.
    tokens = backend(load(write_vocabulary(tmp_path, [*WORDS, "x", "##x", "##e"])))
    found = [tokens.vocabulary[id] for id in tokens.encode(text)]
    assert set(found) - {"hello", "world", ","} == {"[UNK]"}
    assert 10 <= found.count("[UNK]") <= 12
    assert [token for token in found if token != "[UNK]"] == (
        ["hello", ",", "world"] if "hello" in text else []
    )


@pytest.mark.parametrize("unit", ["e,", "hello.", "\u4e2d", "e\u4e2d", "mask]"])
def test_text_without_spaces_is_cut_between_words(tmp_path: Path, backend: Any, unit: str) -> None:
    tokens = backend(load(write_vocabulary(tmp_path, [*WORDS, "##e", ".", "\u4e2d"])))
    text = unit * (300_000 // len(unit))
    whole = tokens.backend.encode(text, add_special_tokens=False).ids
    assert tokens.encode(text).tolist() == whole


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


def test_two_tokens_of_one_id_are_refused(tmp_path: Path) -> None:
    load(write_vocabulary(tmp_path, WORDS)).save(tmp_path, 16)
    file = tmp_path / "tokenizer.json"
    values = json.loads(file.read_bytes())
    values["model"]["vocab"]["twin"] = 10
    file.write_text(json.dumps(values))
    with pytest.raises(CorpusError, match=r"tokens '.*' and '.*' have one id, 10"):
        load(JsonTokenizer(path=file))


def test_special_tokens_have_the_names_in_the_folder_settings(tmp_path: Path) -> None:
    load(write_vocabulary(tmp_path, [*WORDS, "x"])).save(tmp_path / "saved", 16)
    state = (tmp_path / "saved" / "tokenizer.json").read_text()
    settings = json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())
    for key, name in ROBERTA.items():
        state = state.replace(f"[{key.upper()}]", name)
        settings[f"{key}_token"] = {"__type": "AddedToken", "content": name}
    (tmp_path / "saved" / "tokenizer.json").write_text(state)
    (tmp_path / "saved" / "tokenizer_config.json").write_text(json.dumps(settings))
    tokens = load(tmp_path / "saved")
    assert tokens.special_ids.mask == 4
    assert 4 not in tokens.encode("hello <mask> </s>")
    assert load(tmp_path / "saved" / "tokenizer.json").names == ROBERTA


def byte_level(path: Path, names: dict[str, str], post_processor: bool = True) -> Path:
    """Write a byte-level BPE as RoBERTa has it, padding and truncation included."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(name, lstrip=key == "mask") for key, name in names.items()]
    trainer = BpeTrainer(
        vocab_size=300,
        show_progress=False,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([TEXT, "hello world, hello caf\u00e9 \u4e2d\u6587"] * 9, trainer)
    if post_processor:
        ends = [(name, tokenizer.token_to_id(name)) for name in (names["sep"], names["cls"])]
        tokenizer.post_processor = RobertaProcessing(*ends)
    tokenizer.enable_padding(length=16, pad_id=0, pad_token=names["pad"])
    tokenizer.enable_truncation(16)
    tokenizer.save(str(path))
    return path


def test_a_tokenizer_json_alone_tells_its_special_tokens(tmp_path: Path) -> None:
    path = byte_level(tmp_path / "tokenizer.json", ROBERTA)
    theirs = Tokenizer.from_file(str(path))
    theirs.no_padding()
    theirs.no_truncation()
    tokens = load(path)
    assert tokens.names == ROBERTA
    text = "hello World, caf\u00e9 \u4e2d\u6587 \U0001f469"
    cls, *ids, sep = theirs.encode(text).ids
    assert tokens.encode(text).tolist() == ids
    assert (tokens.special_ids.cls, tokens.special_ids.sep) == (cls, sep)
    assert tokens.decode(ids) == text
    assert not set(tokens.encode("a <mask> b</s><pad>").tolist()) & {0, 2, 3, 4}
    settings = {f"{key}_token": name for key, name in ROBERTA.items()}
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "tokenizer_config.json").write_text(json.dumps(settings))
    shutil.copy(path, tmp_path / "folder")
    assert load(tmp_path / "folder").record() == tokens.record()
    tokens.save(tmp_path / "saved", 32)
    assert load(tmp_path / "saved").record() == tokens.record()


def test_a_folder_without_settings_is_read_as_the_file_in_it(tmp_path: Path) -> None:
    path = byte_level(tmp_path / "tokenizer.json", ROBERTA)
    assert load(tmp_path).record() == load(path).record()


def test_unusual_special_tokens_are_named_by_keys(tmp_path: Path) -> None:
    odd = {"pad": "<p>", "unk": "<u>", "cls": "<c>", "sep": "<e>", "mask": "<m>"}
    path = byte_level(tmp_path / "tokenizer.json", odd)
    with pytest.raises(CorpusError, match=r"no pad, unk, mask token .*path: .*, mask: TOKEN"):
        load(path)
    some = {key: odd[key] for key in ("pad", "unk", "mask")}
    assert load(JsonTokenizer(path=path, **some)).names == odd
    byte_level(path, odd, post_processor=False)
    with pytest.raises(CorpusError, match=r"no cls, sep token"):
        load(JsonTokenizer(path=path, **some))
    tokens = load(JsonTokenizer(path=path, **odd))
    assert tokens.names == odd
    # Rows are [CLS] text [SEP], so what is saved beside the weights must make the same.
    tokens.save(tmp_path / "saved", 64)
    saved = Tokenizer.from_file(str(tmp_path / "saved" / "tokenizer.json"))
    assert saved.encode("x").tokens[:: len(saved.encode("x")) - 1] == ["<c>", "<e>"]
    assert load(JsonTokenizer(path=tmp_path, **odd)).names == odd
    with pytest.raises(CorpusError, match="the mask token '<n>' is not in its vocabulary"):
        load(JsonTokenizer(path=path, **odd | {"mask": "<n>"}))
    with pytest.raises(CorpusError, match="pad and mask are both '<p>'"):
        load(JsonTokenizer(path=path, **odd | {"mask": "<p>"}))
    with pytest.raises(CorpusError, match="cannot be read"):
        load(JsonTokenizer(path=tmp_path / "none.json"))


def test_two_usual_names_are_ambiguous(tmp_path: Path) -> None:
    path = byte_level(tmp_path / "tokenizer.json", {**ROBERTA, "other": "[MASK]"})
    with pytest.raises(CorpusError, match=r"mask may be \[MASK\] or <mask>"):
        load(path)
    assert load(JsonTokenizer(path=path, mask="<mask>")).names == ROBERTA


# Single characters and their continuations, so that a difference is not hidden by [UNK].
LETTERS = [chr(code) for code in range(33, 0x400)] + list(
    "\u4e2d\u6587\u0e01\ud55c\u1112\u0301\ufffd"
)
RICH = list(dict.fromkeys([*WORDS, *LETTERS, *(f"##{c}" for c in LETTERS), "##ing", "[unused1]"]))
LITERALS = [*SPECIAL, "[mask]", "[unused1]", "##s", "##", "x" * 100, "x" * 101, "e\u0301" * 51]


@cache
def both(lowercase: bool, strip: bool | None = None) -> tuple[Tokens, Tokens]:
    pytest.importorskip("nanotoken", reason="needs the extra `fast`")
    slow = word_piece(RICH, lowercase, strip, origin="test")
    return slow, accelerated(word_piece(RICH, lowercase, strip, origin="test"))


def assert_same_ids(lowercase: bool, texts: list[str], strip: bool | None = None) -> None:
    """Check that both backends of `Tokens`, and `tokenizers` alone, give the same ids."""
    slow, fast = both(lowercase, strip)
    encoded = fast.encode_batch(texts)
    for text, ids, expected in zip(texts, encoded, slow.encode_batch(texts), strict=True):
        assert ids.dtype == expected.dtype == np.int32
        assert np.array_equal(ids, expected), ascii(text)
        assert not set(ids.tolist()) & {0, 2, 3, 4}
    plain = slow.backend.encode_batch(texts, add_special_tokens=False)
    assert [encoding.ids for encoding in plain] == [ids.tolist() for ids in encoded]


characters = st.characters(exclude_categories=["Cs"])
fragments = st.one_of(
    st.sampled_from(RICH),
    st.sampled_from(RICH).map(str.upper),
    st.sampled_from(LITERALS),
    st.sampled_from(
        " \t\n\r\0\x0b\x1f\x85\xa0\xad\u200d\u2028\u3000\ufeff\u0301\u0345\u0130\u03a3"
    ),
    characters,
    st.just(" "),
)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(st.booleans(), st.lists(st.text(characters, max_size=60), max_size=8))
def test_any_unicode_has_the_same_ids_on_both_backends(lowercase: bool, texts: list[str]) -> None:
    assert_same_ids(lowercase, texts)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.booleans(), st.lists(fragments, max_size=40))
def test_words_and_literals_have_the_same_ids_on_both_backends(
    lowercase: bool, parts: list[str]
) -> None:
    assert_same_ids(lowercase, ["".join(parts), " ".join(parts)])


@pytest.mark.parametrize(
    ("lowercase", "strip"),
    [(True, None), (False, None), (True, False), (False, True)],
    ids=["uncased", "cased", "accents kept", "accents stripped"],
)
def test_every_character_has_the_same_ids_on_both_backends(
    lowercase: bool, strip: bool | None
) -> None:
    codes = [*range(0xD800), *range(0xE000, 0x10000), *range(0x1D400, 0x1FB00)]
    words = [f"e{chr(code)}\u0301x {chr(code)}" for code in codes]
    texts = [" ".join(words[start : start + 16]) for start in range(0, len(words), 16)]
    assert_same_ids(lowercase, texts, strip)


def test_accelerate_returns_why_it_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nanotoken = pytest.importorskip("nanotoken", reason="needs the extra `fast`")
    vocabulary = write_vocabulary(tmp_path, [*WORDS, "C", "Cl"])
    assert (
        "not WordPiece" in load(VocabularyTokenizer(vocab=vocabulary, pattern=SMILES)).accelerate()
    )
    tokens = load(vocabulary)
    tokens.backend.add_tokens(["hell"])
    assert "added tokens" in tokens.accelerate()
    numbered = {token: id for id, token in enumerate(WORDS)}
    other = Tokenizer(models.WordPiece(numbered, unk_token="[UNK]"))
    other.normalizer = normalizers.Replace("a", "b")
    other.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    assert "does not support it" in Tokens(other, BERT, "here").accelerate(["hello"])

    real = nanotoken.WordPieceTokenizer

    class Deaf:
        """Simulate a faulty release that does not know the word "world"."""

        @staticmethod
        def from_json(data: str) -> Any:
            return real.from_json(data.replace("world", "w"))

    with monkeypatch.context() as patched:
        patched.setattr(nanotoken, "WordPieceTokenizer", Deaf)
        tokens = load(vocabulary)
        assert tokens.accelerate(["hello", "a world"]) == (
            "nanotoken differs from tokenizers on 'a world'"
        )
        assert shown(tokens, "hello worlds") == ["hello", "world", "##s"]  # it is not used
    monkeypatch.setitem(sys.modules, "nanotoken", None)
    tokens = load(vocabulary)
    assert tokens.accelerate(["hello"]) == f"nanotoken is not installed; {extra('fast')}"
    assert shown(tokens, "hello worlds") == ["hello", "world", "##s"]


TRAIN = """
import random, sys
from data_prep.config import TrainTokenizer
from data_prep.tokens.training import train_tokenizer
draw = random.Random(0)
letters = "abcdefghij\\u00e9\\u4e2d"
words = ["".join(draw.choices(letters, k=draw.randint(1, 9))) for _ in range(400)]
texts = [" ".join(draw.choices(words, k=50)) for _ in range(100)]
settings = TrainTokenizer(train={"kind": sys.argv[1], "vocab_size": 320}).train
print("\\n".join(train_tokenizer(lambda: iter(texts), settings).vocabulary))
"""


def train_twice(kind: str) -> list[str]:
    """Train in two processes, whose hash maps have other orders; compare, and return the tokens."""
    runs = [python("-X", "utf8", "-c", TRAIN, kind) for _ in range(2)]
    assert runs[0].returncode == 0 and runs[0].stdout == runs[1].stdout, runs[0].stderr
    vocabulary = runs[0].stdout.split("\n")[:-1]
    assert len(vocabulary) == np.unique(vocabulary).size == 320
    return vocabulary


def test_training_wordpiece_twice_gives_one_vocabulary() -> None:
    vocabulary = train_twice("wordpiece")
    assert vocabulary[:5] == SPECIAL
    assert vocabulary[5:10] == ["a", "b", "c", "d", "e"]
    assert "\u00e9" in vocabulary
    assert any(len(token) > 3 for token in vocabulary[5:])


def test_training_byte_level_bpe_twice_gives_one_vocabulary() -> None:
    vocabulary = train_twice("byte-level-bpe")
    assert vocabulary[:5] == ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    assert sorted(vocabulary[5:261]) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert any(len(token) > 3 for token in vocabulary[261:])


GERMAN = [
    "Die Stra\u00dfe \u00fcber M\u00fcnchen f\u00fchrt nach K\u00f6ln.",
    "Gr\u00fc\u00dfe aus \u00c4gypten!",
]


def trained(**keys: Any) -> Tokens:
    """Train a byte-level BPE on German."""
    keys = {"kind": "byte-level-bpe", "vocab_size": 400, **keys}
    return train_tokenizer(
        lambda: iter(GERMAN * 20), TrainTokenizer.model_validate({"train": keys}).train
    )


def test_a_trained_byte_level_bpe_writes_any_text(tmp_path: Path) -> None:
    tokens = trained()
    for text in (*GERMAN, "<mask> \u4e2d\u6587 \U0001f469\u200d\U0001f4bb </s>", "a\tb"):
        ids = tokens.encode(text)
        assert tokens.decode(ids) == text
        assert ids.min() > 4, "text never becomes a special token"
    whole = " M\u00fcnchen"
    assert len(tokens.encode(whole)) < len(whole.encode()) / 3
    tokens.save(tmp_path, 64)
    assert load(tmp_path).record() == load(tmp_path / "tokenizer.json").record() == tokens.record()
    # As users load it: the space before <mask> belongs to the token that it hides.
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    ids = loaded("nach <mask>.")["input_ids"]
    assert ids == [0, *tokens.encode("nach"), 4, *tokens.encode("."), 2]
    assert (loaded.pad_token, loaded.mask_token, loaded.model_max_length) == ("<pad>", "<mask>", 64)


@pytest.mark.parametrize(
    ("keys", "text", "expected"),
    [
        ({}, "Gru\u0308\u00dfe", "Gr\u00fc\u00dfe"),
        ({"normalization": "none"}, "Gru\u0308\u00dfe", "Gru\u0308\u00dfe"),
        ({"normalization": "nfkc"}, "\ufb01n \u00bd", "fin 1\u20442"),
        ({"lowercase": True}, "\u00c4gypten", "\u00e4gypten"),
        ({"strip_accents": True}, "\u00c4gypten", "Agypten"),
        ({"lowercase": True, "strip_accents": True}, "Gru\u0308\u00dfe", "gru\u00dfe"),
    ],
    ids=str,
)
def test_the_normalisation_of_a_byte_level_bpe(
    keys: dict[str, Any], text: str, expected: str
) -> None:
    tokens = trained(**keys)
    assert tokens.decode(tokens.encode(text)) == expected


def test_only_what_is_asked_for_stands_in_the_file_of_a_byte_level_bpe() -> None:
    assert trained(normalization="none").backend.normalizer is None
    assert json.loads(trained().backend.to_str())["normalizer"] == {"type": "NFC"}


def test_nothing_to_train_a_byte_level_bpe_on_is_refused() -> None:
    settings = TrainTokenizer.model_validate({"train": {"kind": "byte-level-bpe"}}).train
    with pytest.raises(CorpusError, match="no text to train on"):
        train_tokenizer(lambda: iter([]), settings)


def test_new_keys_do_not_change_the_recorded_config_of_old_corpora() -> None:
    keys = {"vocab_size": 8000, "lowercase": True, "strip_accents": False}
    recorded = TrainTokenizer.model_validate({"train": {"vocab_size": 8000}}).model_dump()
    assert recorded == {"train": keys}
    wordpiece = {**keys, "normalization": "nfkc"}
    assert TrainTokenizer.model_validate({"train": wordpiece}).model_dump() == {"train": wordpiece}


def test_unigram_is_encoded_as_by_its_own_library(tmp_path: Path) -> None:
    """Train a SentencePiece-like Unigram model of 300 tokens, as XLM-R and CamemBERT have one."""
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    theirs = Tokenizer(models.Unigram())
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    theirs.decoder = decoders.Metaspace()
    trainer = UnigramTrainer(
        vocab_size=300, show_progress=False, special_tokens=special, unk_token="<unk>"
    )
    theirs.train_from_iterator(GERMAN * 20, trainer)
    theirs.post_processor = TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    theirs.save(str(tmp_path / "tokenizer.json"))
    tokens = load(tmp_path / "tokenizer.json")
    assert [getattr(tokens.special_ids, role) for role in ("cls", "pad", "sep", "unk", "mask")] == [
        *range(5)
    ]
    text = " ".join(GERMAN * 9000)  # longer than one call of the encoder
    assert [0, *tokens.encode(text), 2] == theirs.encode(text).ids
    assert tokens.decode(tokens.encode(GERMAN[0])) == GERMAN[0]
