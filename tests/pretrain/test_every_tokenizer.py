"""Take every kind of tokenizer from its file to `fill-mask`: corpus, training, export."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import backends
from support.runs import history, refused, start
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, pipeline

from data_prep import CorpusError
from data_prep.config import CorpusConfig
from data_prep.prepare import prepare
from data_prep.shards import load_manifest, open_shards
from pretrain.export.export import export

Settings = Callable[..., dict[str, Any]]
LARGE = 250_000
WORDS = [
    "Zürich",
    "grüßt",
    "die",
    "Müller",
    "am",
    "Fluß",
    "wo",
    "Äpfel",
    "und",
    "Öl",
    "stehen",
    ",",
    "naïve",
    "Cafés",
    "!",
    "17",
    ".",
]


def texts() -> list[str]:
    draw = random.Random(6)
    return [" ".join(draw.choices(WORDS, k=draw.randint(5, 70))) for _ in range(120)]


def word_piece(size: int = 200) -> Tokenizer:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    backend = backends.word_piece(texts(), 200, special)
    if size > backend.get_vocab_size():
        words = sorted(backend.get_vocab(), key=backend.token_to_id)
        # The words that are used come last: their ids need more than 16 bits.
        filler = [f"##unused{i}" for i in range(size - len(words))]
        numbered = {word: i for i, word in enumerate([*special, *filler, *words[len(special) :]])}
        backend.model = models.WordPiece(numbered, unk_token="[UNK]")
    return backend


KINDS: dict[str, tuple[Callable[[], Tokenizer], str]] = {
    "word-piece": (word_piece, "bert"),
    "large": (lambda: word_piece(LARGE), "bert"),
    "byte-level": (lambda: backends.byte_level(texts(), 320), "roberta"),
    "unigram": (lambda: backends.unigram(texts(), 200), "roberta"),
}


def corpus(folder: Path, tokenizer: Path) -> Path:
    (folder / "texts.txt").write_text("\n\n".join(texts()) + "\n", encoding="utf-8")
    values = {
        "output": folder / "shards",
        "tokenizer": str(tokenizer),
        "sources": [{"kind": "text", "path": str(folder / "texts.txt"), "document": "paragraph"}],
        "row_length": 32,
        "validation": 0.1,
        "workers": 1,
        "min_characters": 1,
        "deduplicate": {"documents": "none"},
    }
    prepare(CorpusConfig.model_validate(values))
    return folder / "shards"


# Above 65,535 tokens ids are uint32, which test_a_large_vocabulary_takes_uint32 covers, too.
@pytest.mark.parametrize(
    ("kind", "form"),
    [
        pytest.param(kind, form, marks=[pytest.mark.slow] if kind == "large" else [])
        for kind in KINDS
        for form in ("file", "folder")
    ],
)
def test_a_tokenizer_goes_from_its_file_to_fill_mask(
    kind: str, form: str, tmp_path: Path, run_config: Settings
) -> None:
    """Save it as a sentence encoder's, which truncates and pads: no document may be cut."""
    build, architecture = KINDS[kind]
    backend = build()
    names = ["[PAD]", "[MASK]"] if architecture == "bert" else ["<pad>", "<mask>"]
    plain = Tokenizer.from_str(backend.to_str())
    backend.enable_truncation(8)
    backend.enable_padding(length=8, pad_id=backend.token_to_id(names[0]), pad_token=names[0])
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    if form == "folder":
        roles = {"pad_token": names[0], "mask_token": names[1], "model_max_length": 8}
        (folder / "tokenizer_config.json").write_text(json.dumps(roles))
    shards = corpus(tmp_path, folder if form == "folder" else folder / "tokenizer.json")

    # The rows hold every token of every document.
    manifest = load_manifest(shards)
    special = [*manifest.tokenizer.special_ids.model_dump().values()]
    splits = [open_shards(shards, split) for split in ("train", "validation")]
    found = np.concatenate([split.rows(np.arange(len(split))).ravel() for split in splits])
    expected = np.concatenate([plain.encode(text).ids for text in texts()])
    ours, theirs = (np.sort(ids[~np.isin(ids, special)]) for ids in (found, expected))
    assert len(ours) > 2000 and np.array_equal(ours, theirs)
    assert manifest.dtype == ("uint32" if kind == "large" else "uint16")
    assert manifest.tokenizer.vocab_size == plain.get_vocab_size()

    values = run_config(
        tmp_path / "run",
        objective={"name": "mlm"},
        model={
            "architecture": architecture,
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 16,
            "max_position_embeddings": 64,
        },
        train={"max_steps": 2, "global_batch_size": 4},
        masking={"mode": "whole_word"},
    )
    values["shards"] = str(shards)
    start(values)
    losses = [entry["loss"] for entry in history(values["output"]) if entry["kind"] == "train"]
    assert len(losses) == 2 and np.isfinite(losses).all()
    export(tmp_path / "run", tmp_path / "exported", pytest.fail)

    loaded = AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert [loaded(text)["input_ids"] for text in texts()] == [
        plain.encode(text).ids for text in texts()
    ]
    assert loaded.model_max_length == 64 and loaded.mask_token == names[1]
    fill = pipeline("fill-mask", model=str(tmp_path / "exported"), device="cpu")
    answers = fill(f"Z\u00fcrich gr\u00fc\u00dft {names[1]} M\u00fcller", top_k=3)
    assert len(answers) == 3
    for answer in answers:
        assert (
            "Z\u00fcrich gr\u00fc\u00dft" in answer["sequence"]
            and "M\u00fcller" in answer["sequence"]
        )
        assert answer["token"] < plain.get_vocab_size()


def test_a_tokenizer_without_a_mask_token_is_refused(tmp_path: Path) -> None:
    """Name the tokens that are missing and the keys that name them, as of a decoder's tokenizer."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False, special_tokens=["<eos>"])
    backend.train_from_iterator(texts(), trainer)
    backend.save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path / "tokenizer.json", tmp_path):
        with refused("no pad, unk, cls, sep, mask token is to be found", kind=CorpusError):
            corpus(tmp_path, path)
