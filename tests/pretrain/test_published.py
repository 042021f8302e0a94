"""Read published encoders as transformers and sentence-transformers read them.

`published.json` holds the keys and settings of their public files. Sizes and vocabularies are
small here, and weights are random.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import backends
from support.processes import ROOT
from tokenizers import normalizers, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PreTrainedConfig,
)

from data_prep.tokens import load
from pretrain.contracts.packing import find_documents
from pretrain.evaluation.encoders import load_encoder
from pretrain.model.families import encode
from pretrain.model.folder import read_model

PUBLISHED = json.loads((ROOT / "tests/pretrain/published.json").read_bytes())
TEXTS = [
    "The small cat sat on a mat, and Zürich is far.",
    "Two CATS; three mats! 42 times, naïve café.",
    "A mat is no cat, and the far mat sat.",
    "中文 cat",
]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
HIDDEN, LAYERS, HEADS, INNER = 24, 2, 2, 32


def write_tokenizer(folder: Path, kind: str) -> int:
    """Write a tokenizer's own file; return the size of its vocabulary."""
    if kind == "vocabulary":  # of releases before tokenizer.json
        letters = sorted({c for text in TEXTS for c in text.lower() if not c.isspace()})
        words = [*SPECIAL, *letters, *(f"##{letter}" for letter in letters)]
        (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
        return len(words)
    if kind in ("lower", "cased"):
        backend = backends.word_piece(TEXTS, 150, SPECIAL)
        backend.normalizer = normalizers.BertNormalizer(lowercase=kind == "lower")
    else:
        build = {"bpe": backends.byte_level, "pieces": backends.unigram}[kind]
        backend = build(TEXTS, 320 if kind == "bpe" else 60)
        if kind == "pieces":  # theirs have a table of SentencePiece in place of NFKC
            backend.normalizer = None
            parts = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
            backend.pre_tokenizer = pre_tokenizers.Sequence(parts)
    backend.save(str(folder / "tokenizer.json"))
    return backend.get_vocab_size()


def write(name: str, folder: Path) -> PreTrainedConfig:
    """Write the folder of a published model; return its config."""
    folder.mkdir(parents=True)
    published = PUBLISHED[name]
    small = {"vocab_size": write_tokenizer(folder, published["tokenizer"])}
    if published["files"]["config.json"].get("model_type") == "distilbert":
        small |= {"dim": HIDDEN, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": INNER}
    else:
        small |= {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS}
        small |= {"num_attention_heads": HEADS, "intermediate_size": INNER}
    small["max_position_embeddings"] = 66
    for file, values in published["files"].items():
        (folder / file).parent.mkdir(exist_ok=True)
        values = values | small if file == "config.json" else values
        (folder / file).write_text(json.dumps(values), encoding="utf-8")
    torch.manual_seed(0)
    raw = json.loads((folder / "config.json").read_bytes())
    config = AutoConfig.for_model(**{"model_type": "bert"} | raw)  # old files name no type
    head = str(config.architectures).endswith("ForMaskedLM']")
    model = (AutoModelForMaskedLM if head else AutoModel).from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    model.save_pretrained(folder / "weights")
    (folder / "weights/model.safetensors").rename(folder / "model.safetensors")
    for place in folder.glob("*_Dense"):
        dense = {"linear.weight": torch.randn(12, HIDDEN), "linear.bias": torch.randn(12)}
        save_file(dense, place / "model.safetensors")
    return config


@torch.no_grad()
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_encoder_is_read_as_its_libraries_read_it(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    config = write(name, folder)
    old = {} if "tokenizer.json" in os.listdir(folder) else {"tokenizer_type": "bert"}
    theirs, tokens = AutoTokenizer.from_pretrained(folder, **old), load(folder).backend
    assert [tokens.encode(text).ids for text in TEXTS] == theirs(TEXTS)["input_ids"]

    ids = torch.tensor([tokens.encode(TEXTS[0]).ids])
    model = read_model(str(folder), lambda loaded: loaded.model.eval(), needs_head=False)
    ends = torch.tensor([0, ids.shape[1]], dtype=torch.int32)
    packing = find_documents(ids, ends, ids.shape[1], pad_id=-1)
    wanted = AutoModel.from_pretrained(folder, config=config, dtype=torch.float32)
    found = encode(model, ids, packing).last_hidden_state
    torch.testing.assert_close(found, wanted.eval()(ids).last_hidden_state, atol=1e-4, rtol=1e-4)

    if "modules.json" in PUBLISHED[name]["files"]:
        library = pytest.importorskip("sentence_transformers")
        encoder = library.SentenceTransformer(str(folder), device="cpu").float()
        vectors = load_encoder(str(folder))(TEXTS)
        assert np.abs(vectors).max() > 0.1
        np.testing.assert_allclose(vectors, encoder.encode(TEXTS), atol=1e-5)
