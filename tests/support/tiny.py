"""Build tiny real models; no parameter is accidentally zero."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DistilBertConfig,
    DistilBertForMaskedLM,
    PreTrainedTokenizerFast,
)

from pretrain.model.teacher import Teacher

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]  # ids 0 to 4
VOCAB_SIZE = 200
ROW_LENGTH = 32

# A random student, half as wide as the tiny BERT.
NARROW = {
    "architecture": "same",
    "init": "random",
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "intermediate_size": 32,
}


def _words() -> list[str]:
    """Draw different words of six letters, none a part of another."""
    draw = random.Random(3)
    words: dict[str, None] = {}
    while len(words) < VOCAB_SIZE - len(SPECIAL):
        words["".join(draw.choices("abcdefghij", k=6))] = None
    return [*words]


VOCABULARY = SPECIAL + _words()  # in id order


def tiny_bert(
    layers: int = 4, *, seed: int = 0, width: int = 32, **changes: Any
) -> BertForMaskedLM:
    """Build a BERT in eval mode whose every parameter is random."""
    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "intermediate_size": 2 * width,
        "max_position_embeddings": 2 * ROW_LENGTH,
    }
    return _randomised(BertForMaskedLM(BertConfig(**values | changes)), seed)


def tiny_distilbert(layers: int = 2, *, seed: int = 1, width: int = 32) -> DistilBertForMaskedLM:
    """Build a DistilBERT in eval mode whose every parameter is random."""
    config = DistilBertConfig(
        vocab_size=VOCAB_SIZE,
        dim=width,
        n_layers=layers,
        n_heads=4,
        hidden_dim=2 * width,
        max_position_embeddings=2 * ROW_LENGTH,
    )
    return _randomised(DistilBertForMaskedLM(config), seed)


def save_teacher(
    folder: Path, model: BertForMaskedLM | None = None, words: Sequence[str] = VOCABULARY
) -> BertForMaskedLM:
    """Write a model, by default `tiny_bert()`, and tokenizer files into a folder; return it."""
    model = model or tiny_bert()
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return model


def as_teacher(model: BertForMaskedLM) -> Teacher:
    """Return a Teacher of a model that was never saved."""
    return Teacher(model=model, name="tiny", local=True, revision=None, sha256="0" * 64)


def word_tokenizer(pad: str = "[PAD]", template: str = "[CLS] $A [SEP]") -> PreTrainedTokenizerFast:
    """Return a tokenizer over the tiny vocabulary."""
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(VOCABULARY)}, "[UNK]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=pad, mask_token="[MASK]", **names
    )


@torch.no_grad()
def _randomised(model: Any, seed: int) -> Any:
    """Draw weights of deviation 0.2, biases of 0.1, LayerNorm about 1; set eval mode."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            parameter.copy_(0.2 * noise)
        else:
            parameter.copy_(0.1 * noise + float(name.lower().endswith("norm.weight")))
    return model.eval()
