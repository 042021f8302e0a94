"""Check masks of whole words with a reference in plain Python, and changing shares."""

import json
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from support.masks import CLS, PAD, SEP, SPECIAL, UNIFORM, V, mask, ordinary, selected
from support.runs import history, refused, start, step_folder
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer, UnigramTrainer

from data_prep.config import CorpusConfig
from data_prep.prepare import prepare
from data_prep.shards import Manifest
from pretrain.config import MaskingConfig, RunConfig
from pretrain.contracts.batch import IGNORE
from pretrain.data.hashing import derive, root
from pretrain.tasks.mlm.examples import build_masking
from pretrain.tasks.mlm.masking import Masking
from pretrain.tasks.mlm.words import (
    Borders,
    borders,
    byte_alphabet,
    draw_words,
    first_kind,
)

GOES_ON = np.arange(V) % 3 == 0  # a third of the tokens continue a word
WORDS = replace(UNIFORM, words=Borders(GOES_ON, *[np.zeros(V, bool)] * 4))


@pytest.fixture(scope="module")
def ids() -> Any:
    """Return 256 rows of 128: documents of 3 to 60 tokens, and padding."""
    draw = np.random.default_rng(1)
    rows = draw.integers(len(SPECIAL), V, (256, 128))
    for row in rows:
        start, end = 0, int(draw.integers(100, 129))
        while start < end:
            stop = min(end, start + int(draw.integers(3, 60)))
            row[start], row[stop - 1] = CLS, SEP
            start = stop
        row[end:] = PAD
    return rows


def words_of(row: list[int]) -> list[list[int]]:
    """Return the positions of each word; a special token is a word."""
    words: list[list[int]] = []
    for i, token in enumerate(row):
        if i and GOES_ON[token] and token not in SPECIAL and row[i - 1] not in SPECIAL:
            words[-1].append(i)
        else:
            words.append([i])
    return words


def naive(row: list[int], number: int, masking: Masking) -> set[int]:
    """Return the positions that are selected in a row of epoch 0, word by word."""
    words = words_of(row)
    base = derive(root(masking.seed, 2), 0)
    select = derive(derive(base, 0), number)
    draws = {w: derive(select, word[0]) for w, word in enumerate(words)}
    special = [row[word[0]] in SPECIAL for word in words]
    ordinary_words = [w for w in draws if not special[w]]
    num = sum(len(words[w]) for w in ordinary_words)
    wanted = max(1, (num * int(0.15 * 65536 + 0.5) + 32768) >> 16) if num else 0
    chosen: list[int] = []
    order = sorted(ordinary_words, key=lambda w: (draws[w], words[w][0]))
    for w in order:
        if len(chosen) + len(words[w]) <= wanted:  # one that does not fit is passed over
            chosen += words[w]
    return set(chosen or (words[order[0]][:wanted] if order else []))


def test_the_selected_tokens_are_those_of_the_reference(ids: Any) -> None:
    result = mask(ids, WORDS)
    flags = selected(result, ids.shape)
    for number, row in enumerate(ids.tolist()):
        assert set(np.flatnonzero(flags[number])) == naive(row, number, WORDS), number
    assert not (flags & ~ordinary(ids)).any()
    assert 0.149 < flags.sum() / ordinary(ids).sum() < 0.151


TEXTS = {
    "english": "Hello \u201cwonderful\u201d worlds (of 1,000 people), "
    "don't they\u2014it's \u20ac5?",
    "russian": "\u041c\u043e\u0439 \u0434\u044f\u0434\u044f \u0441\u0430\u043c\u044b\u0445 "
    "\u00ab\u0447\u0435\u0441\u0442\u043d\u044b\u0445\u00bb \u043f\u0440\u0430\u0432\u0438\u043b, "
    "\u043a\u043e\u0433\u0434\u0430 \u043d\u0435 \u0432 \u0448\u0443\u0442\u043a\u0443.",
    "hebrew": "\u05d1\u05bc\u05b0\u05e8\u05b5\u05d0\u05e9\u05c1\u05b4\u05d9\u05ea "
    "\u05d1\u05e8\u05d0 \u05d0\u05dc\u05d4\u05d9\u05dd \u05d0\u05ea "
    "\u05d4\u05e9\u05de\u05d9\u05dd.",
    "hindi": "\u0938\u092d\u0940 \u092e\u0928\u0941\u0937\u094d\u092f\u094b\u0902 "
    "\u0915\u094b \u0917\u094c\u0930\u0935 \u0914\u0930 \u0905\u0927\u093f\u0915\u093e"
    "\u0930\u094b\u0902 \u0915\u0947 \u092e\u093e\u092e\u0932\u0947 \u092e\u0947\u0902.",
    "thai": "\u0e21\u0e19\u0e38\u0e29\u0e22\u0e4c\u0e17\u0e31\u0e49\u0e07\u0e2b\u0e25\u0e32"
    "\u0e22\u0e40\u0e01\u0e34\u0e14\u0e21\u0e32 \u0e21\u0e35\u0e2d\u0e34\u0e2a\u0e23\u0e30",
    "chinese": "\u4eba\u4eba\u751f\u800c\u81ea\u7531, \u5728\u5c0a\u4e25\u4e0a.",
}
UNSPACED = ("thai", "chinese")
CUT = {"\u00e0\u00b8", "\u00e0\u00b9"}  # the first two bytes of Thai characters


def tokenizer(kind: str, texts: list[str]) -> Tokenizer:
    """Train a small tokenizer, which cuts most words."""
    trainer: Any
    if kind == "unigram":
        backend = Tokenizer(models.Unigram())
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = UnigramTrainer(
            vocab_size=190, show_progress=False, unk_token="<unk>", special_tokens=["<unk>"]
        )
    else:
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = (
            pre_tokenizers.Metaspace()
            if kind == "metaspace"
            else pre_tokenizers.ByteLevel(add_prefix_space=False)
        )
        alphabet = pre_tokenizers.ByteLevel.alphabet() if kind == "byte-level" else []
        trainer = BpeTrainer(
            vocab_size=290 if alphabet else 130, show_progress=False, initial_alphabet=alphabet
        )
    backend.train_from_iterator(texts * 9, trainer)
    return backend


def inside(text: str, at: int, script: str) -> bool:
    """Return whether a word of the text goes on at a character, by the characters themselves."""
    kinds = [unicodedata.category(character)[0] for character in text[at - 1 : at + 1]]
    if script in UNSPACED and kinds[-1] != "M":
        return False
    return at > 0 and all(kind in "LMN" for kind in kinds)


@pytest.mark.parametrize("script", TEXTS)
@pytest.mark.parametrize("kind", ["byte-level", "metaspace", "unigram"])
def test_words_of_all_scripts_end_where_their_characters_say(kind: str, script: str) -> None:
    """Compare with the offsets of each token in the text, and the categories around them."""
    backend, text = tokenizer(kind, [*TEXTS.values()]), TEXTS[script]
    found = borders(backend.to_str().encode())
    encoding = backend.encode(text)
    ids = np.array([encoding.ids])
    none = np.zeros(len(found.goes_on), bool)
    word = draw_words(ids.astype(np.uint32), ids, found, none).word[0]
    seen, cut = 0, 0
    for place in range(1, len(encoding.ids)):
        before, (begin, end) = encoding.offsets[place - 1], encoding.offsets[place]
        if encoding.tokens[place - 1] in ("\u2581", "\u0120"):
            continue  # behind the mark of a space without a word
        if script in UNSPACED and kind == "byte-level" and encoding.tokens[place] in CUT:
            continue  # the first byte of a letter or of a combining sign
        if text[begin:end].startswith(" "):
            expected = False
        else:  # inside a character, or as its neighbours are
            expected = begin < before[1] or inside(text, begin, script)
        assert (word[place] == word[place - 1]) == expected, (encoding.tokens, place)
        seen, cut = seen + 1, cut + expected
    assert seen > 8 and (cut > 4 or script in UNSPACED)


def test_pieces_of_wordpiece_are_words_in_scripts_without_spaces() -> None:
    """Let a character-level vocabulary cut Thai, kana and Latin."""
    words = ["\u0e01", "\u0e02", "\u3042", "\u30ab", "a", "b"]
    tokens = [*words, *(f"##{word}" for word in [*words, "\u0e31"])]
    backend = Tokenizer(models.WordPiece({token: id for id, token in enumerate(tokens)}))
    found = borders(backend.to_str().encode())
    goes_on = {token for id, token in enumerate(tokens) if found.goes_on[id]}
    assert goes_on == {"##a", "##b", "##\u0e31"}  # the last is a combining sign
    unspaced = {token for id, token in enumerate(tokens) if found.unspaced[id]}
    assert unspaced >= {f"{prefix}{word}" for prefix in ("", "##") for word in words[:4]}
    assert not unspaced & {"a", "b", "##a", "##b"}


@pytest.mark.parametrize("text", ["\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645", "x\u00ady"])
def test_joiners_stand_inside_words(text: str) -> None:
    backend = tokenizer("byte-level", [text])  # so that the joiner is one token
    found = borders(backend.to_str().encode())
    ids = np.array([backend.encode(text).ids])
    drawn = draw_words(ids.astype(np.uint32), ids, found, np.zeros(len(found.goes_on), bool))
    assert ids.shape[1] > 1 and set(drawn.word[0].tolist()) == {0}


def test_a_hole_in_the_ids_shifts_no_mark() -> None:
    backend = tokenizer("byte-level", [*TEXTS.values()])
    state = json.loads(backend.to_str())
    whole = borders(json.dumps(state).encode())
    vocabulary = state["model"]["vocab"]
    state["model"]["vocab"] = {t: id + 3 * (id >= 100) for t, id in vocabulary.items()}
    shifted = borders(json.dumps(state).encode())
    for id in vocabulary.values():
        for marks, moved in zip(whole, shifted, strict=True):
            assert moved[id + 3 * (id >= 100)] == marks[id]


def test_the_alphabet_of_bytes_is_that_of_tokenizers() -> None:
    """Encode every character of one or two bytes with the library's own pre-tokenizer."""
    alphabet = byte_alphabet()
    for character in map(chr, [*range(1, 0x800)]):
        ((spelled, _),) = pre_tokenizers.ByteLevel(
            add_prefix_space=False, use_regex=False
        ).pre_tokenize_str(character)
        assert bytes(alphabet[letter] for letter in spelled) == character.encode()


def test_the_words_of_wordpiece_are_read_from_the_shards(corpus: Path, manifest: Manifest) -> None:
    masking = build_masking(MaskingConfig(mode="whole_word"), corpus, manifest, 0)
    state = json.loads((corpus / "tokenizer" / "tokenizer.json").read_bytes())
    vocabulary = state["model"]["vocab"]
    assert masking.words is not None
    for token, id in vocabulary.items():
        assert masking.words.goes_on[id] == (token.startswith("##") and token != "##"), token


def test_a_tokenizer_without_words_is_refused() -> None:
    backend = Tokenizer(models.WordLevel({"C": 0, "[UNK]": 1}, unk_token="[UNK]"))
    with pytest.raises(ValueError, match="WordLevel without marks of word borders"):
        borders(backend.to_str().encode())


def test_a_run_over_symbols_without_words_is_refused(
    tmp_path: Path, run_config: Callable[..., Any]
) -> None:
    symbols = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"CNOcno()=#123"]
    (tmp_path / "vocab.txt").write_text("\n".join(symbols) + "\n", encoding="utf-8")
    (tmp_path / "s.txt").write_text("\n".join(["CCO", "c1cc(N)cc1"] * 40), encoding="utf-8")
    source = {"kind": "text", "path": str(tmp_path / "s.txt"), "document": "line"}
    corpus = {"output": tmp_path / "shards", "sources": [source], "row_length": 32, "workers": 1}
    corpus |= {"tokenizer": {"vocab": tmp_path / "vocab.txt", "pattern": "."}}
    prepare(CorpusConfig.model_validate({**corpus, "deduplicate": {"documents": "none"}}))
    values = run_config(
        tmp_path / "run",
        objective={"name": "mlm"},
        shards=str(tmp_path / "shards"),
        model={"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        train={"max_steps": 1, "global_batch_size": 4},
        masking={"mode": "whole_word"},
    )
    with refused("masking.mode whole_word", "holds no words", "take mode uniform"):
        start(values)


def test_the_share_changes_linearly(ids: Any) -> None:
    rising = replace(UNIFORM, probability=0.0, final=0.3, num_steps=11)
    assert rising.num_slots(100) == 30
    numbers = (np.zeros(len(ids), int), np.arange(len(ids)))
    for step, share in ((0, 0.0), (5, 0.15), (10, 0.3)):
        result = rising(ids, *numbers, step)
        found = (result.labels != IGNORE).sum() / ordinary(ids).sum()
        assert found == pytest.approx(share, abs=0.002)
    assert np.array_equal(rising(ids, *numbers, 0).input_ids, ids)
    # The same draws at the same share.
    assert np.array_equal(mask(ids).input_ids, rising(ids, *numbers, 5).input_ids)


CONFIGS = [
    {"mode": "whole_word"},
    {"probability": [0.3, 0.0]},
    {"probability": 0.0},
]


@pytest.mark.parametrize("masking", CONFIGS, ids=str)
def test_runs_train_with_each_masking(
    masking: dict[str, Any], tmp_path: Path, teacher_folder: Path, run_config: Callable[..., Any]
) -> None:
    """Check the number of masked tokens in the log, and that evaluation has 15 % in every run."""
    values = run_config(
        tmp_path / "run",
        teacher_folder,
        student={"num_layers": 2},
        objective={"mlm": 0.0},
        train={"max_steps": 3, "global_batch_size": 8, "micro_batch_size": 4},
        evaluation={"every": 3},
        masking=masking,
    )
    assert start(values).ended == "finished"
    plain = {**values, "output": str(tmp_path / "plain"), "masking": {}}
    start(plain)
    counts = [
        [e["masked_tokens"] for e in history(run["output"]) if e["kind"] == "evaluation"]
        for run in (values, plain)
    ]
    assert counts[0] == counts[1] and min(counts[0]) > 0


@pytest.mark.parametrize("name", ["distilbert", "mlm"])
def test_a_step_without_masked_tokens_is_legal(
    name: str, tmp_path: Path, teacher_folder: Path, run_config: Callable[..., Any]
) -> None:
    """Let the share fall to 0: terms on masked tokens are 0 there, and have no gradient."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = {"model": {**sizes, "intermediate_size": 16}} if name == "mlm" else {}
    values = run_config(
        tmp_path / "run",
        None if name == "mlm" else teacher_folder,
        objective={"name": name},
        train={"max_steps": 3, "global_batch_size": 4, "micro_batch_size": 2},
        masking={"probability": [0.3, 0.0]},
        **model,
    )
    assert start(values).ended == "finished"
    losses = [e for e in history(values["output"]) if e["kind"] == "train"]
    assert losses[0]["mlm"] > 0 and losses[2]["mlm"] == 0
    assert all(np.isfinite(e["loss"]) for e in losses)
    weights = load_file(step_folder(values["output"], 3) / "student" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_a_term_on_masked_tokens_without_any_is_refused() -> None:
    values = {"output": "o", "shards": "s", "teacher": "t", "masking": {"probability": 0}}
    with pytest.raises(ValueError, match=r"masking\.probability is 0"):
        RunConfig.model_validate(values)


def test_a_cut_character_is_of_the_script_of_most_that_begin_with_its_bytes() -> None:
    """Take the first bytes of Devanagari and of Thai, which has no spaces: U+0900 and U+0E00."""
    assert first_kind(b"\xe0\xa4") == ("L", False)
    assert first_kind(b"\xe0\xb8") == ("L", True)
