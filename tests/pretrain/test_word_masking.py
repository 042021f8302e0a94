"""Check masks of whole words and spans with a reference in plain Python, and changing shares."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import history, start, step_folder
from safetensors.torch import load_file
from test_masking import CLS, MASK, PAD, SEP, SPECIAL, UNIFORM, V, mask, ordinary, selected
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer

from data_prep.shards import Manifest
from pretrain.config import MaskingConfig, RunConfig
from pretrain.data.hashing import derive, root
from pretrain.data.masking import IGNORE, MaskedRows, Masking
from pretrain.data.rows import build_masking
from pretrain.data.words import LONGEST, continuations

GOES_ON = np.arange(V) % 3 == 0  # a third of the tokens continue a word
WORDS = replace(UNIFORM, goes_on=GOES_ON)
SPANS = replace(WORDS, spans=True)
LENGTHS = [0.2 * 0.8**k for k in range(LONGEST)]  # of spans, up to a factor


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
    select, lengths = (derive(derive(base, purpose), number) for purpose in (0, 3))
    draws = {w: derive(select, word[0]) for w, word in enumerate(words)}
    special = [row[word[0]] in SPECIAL for word in words]
    if masking.spans:
        total, smallest = sum(LENGTHS), dict(draws)
        for w, word in enumerate(words):
            u, size = derive(lengths, word[0]) / 2**32, 1
            while u >= sum(LENGTHS[:size]) / total:
                size += 1
            for other in range(w, min(w + size, len(words))):
                if special[other] and other > w:
                    break
                smallest[other] = min(smallest[other], draws[w])
        draws = smallest
    ordinary_words = [w for w in draws if not special[w]]
    num = sum(len(words[w]) for w in ordinary_words)
    wanted = max(1, (num * int(0.15 * 65536 + 0.5) + 32768) >> 16) if num else 0
    chosen: list[int] = []
    for w in sorted(ordinary_words, key=lambda w: (draws[w], words[w][0])):
        if len(chosen) + len(words[w]) > wanted and chosen:
            break
        chosen += words[w][: wanted - len(chosen)]
    return set(chosen)


@pytest.mark.parametrize("masking", [WORDS, SPANS], ids=["words", "spans"])
def test_the_selected_tokens_are_those_of_the_reference(ids: Any, masking: Masking) -> None:
    result = mask(ids, masking)
    flags = selected(result, ids.shape)
    for number, row in enumerate(ids.tolist()):
        assert set(np.flatnonzero(flags[number])) == naive(row, number, masking), number
    assert not (flags & ~ordinary(ids)).any()
    # A word that does not fit is left out: half a word a row in the mean.
    assert 0.13 < flags.sum() / ordinary(ids).sum() < 0.15


@pytest.mark.parametrize("masking", [WORDS, SPANS], ids=["words", "spans"])
def test_masks_do_not_depend_on_the_batch(ids: Any, masking: Masking) -> None:
    whole = mask(ids, masking)
    for rows in (np.arange(7), np.array([200, 3, 77])):
        part = masking(ids[rows], np.zeros(len(rows), int), rows)
        assert all(np.array_equal(a[rows], b) for a, b in zip(whole, part, strict=True))


def test_a_span_is_replaced_as_a_whole(ids: Any) -> None:
    """Check that [MASK] and the original token meet far less often than by single draws."""

    def mixed(result: MaskedRows) -> float:
        flags = selected(result, ids.shape)
        masked = result.input_ids == MASK
        pairs = flags[:, 1:] & flags[:, :-1]
        return float((masked[:, 1:] != masked[:, :-1])[pairs].mean())

    assert mixed(mask(ids, SPANS)) < 0.1 < mixed(mask(ids, WORDS))  # 2 * 0.8 * 0.2 is 0.32


def test_spans_are_as_long_as_in_spanbert() -> None:
    """Mask one long document at 1 %, so that spans rarely meet; SpanBERT's mean is 3.8 words."""
    rows = np.random.default_rng(2).integers(len(SPECIAL), V, (400, 1024))
    spans = replace(UNIFORM, probability=0.01, goes_on=np.zeros(V, bool), spans=True)
    flags = selected(mask(rows, spans), rows.shape)
    begins = flags & ~np.pad(flags, ((0, 0), (1, 0)))[:, :-1]
    # The last span of a row is cut at 10 tokens, so the mean is a little shorter.
    assert 2.8 < flags.sum() / begins.sum() < 3.9
    expected = sum((k + 1) * p for k, p in enumerate(LENGTHS)) / sum(LENGTHS)
    assert expected == pytest.approx(3.8, abs=0.01)


def tokenizer(folder: Path, kind: str) -> tuple[bytes, list[str]]:
    """Return tokenizer.json and the tokens of a text, each with its first letter upper if new."""
    texts = ["hello wonderful worlds, hello!"] * 9
    space = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace() if kind == "metaspace" else space
    backend.train_from_iterator(texts, BpeTrainer(vocab_size=28, show_progress=False))
    backend.save(str(folder / "tokenizer.json"))
    return (folder / "tokenizer.json").read_bytes(), backend.encode(texts[0]).tokens


@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
def test_words_of_other_tokenizers_begin_after_spaces_and_at_punctuation(
    tmp_path: Path, kind: str
) -> None:
    data, tokens = tokenizer(tmp_path, kind)
    vocabulary = json.loads(data)["model"]["vocab"]
    goes_on = continuations(data)
    words: list[str] = []
    for i, token in enumerate(tokens):
        text = token.replace("\u0120", " ").replace("\u2581", " ").strip()
        if i and goes_on[vocabulary[token]]:
            words[-1] += text
        else:
            words.append(text)
    assert words == ["hello", "wonderful", "worlds", ",", "hello", "!"]
    assert len(tokens) > len(words)


def test_the_words_of_wordpiece_are_read_from_the_shards(corpus: Path, manifest: Manifest) -> None:
    masking = build_masking(MaskingConfig(mode="whole_word"), corpus, manifest, 0)
    state = json.loads((corpus / "tokenizer" / "tokenizer.json").read_bytes())
    vocabulary = state["model"]["vocab"]
    assert masking.goes_on is not None
    for token, id in vocabulary.items():
        assert masking.goes_on[id] == (token.startswith("##") and token != "##"), token


def test_a_tokenizer_without_words_is_refused() -> None:
    backend = Tokenizer(models.WordLevel({"C": 0, "[UNK]": 1}, unk_token="[UNK]"))
    with pytest.raises(ValueError, match="WordLevel without marks of word borders"):
        continuations(backend.to_str().encode())


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
    {"mode": "span"},
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
