"""The teacher: a BERT with a trained MLM head, held against the shards before anything starts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

from data_prep.shards import Manifest, vocabulary_sha256
from pretrain import RunError
from pretrain.attention import IMPLEMENTATION
from pretrain.models import check_row_length, first_line, read_config


@dataclass(frozen=True)
class Teacher:
    """A frozen BERT with a trained MLM head, and what identifies it."""

    model: BertForMaskedLM
    name: str
    local: bool  # a folder of this machine, which means nothing elsewhere
    revision: str | None  # the commit, where it came from a hub
    sha256: str  # of its parameters


def load_teacher(name: str, manifest: Manifest) -> Teacher:
    """Load a teacher from a folder, a hub name or `name@revision`, and hold it against the shards.

    Raises:
        RunError: it cannot be read, is no BERT, has no trained MLM head, its vocabulary is not the
            shards', or its positions are fewer than a row's.
    """
    if Path(name).is_file():
        raise RunError(
            f"teacher {name}: a file; give the folder that holds config.json and weights"
        )
    source, _, revision = (name, "", "") if Path(name).exists() else name.partition("@")
    raw = read_config(f"teacher {name}", source, revision or None)
    _refuse_config(name, raw)
    try:
        loaded: Any = BertForMaskedLM.from_pretrained(
            source,
            revision=revision or "main",
            config=BertConfig.from_dict(raw),
            dtype=torch.float32,
            attn_implementation=IMPLEMENTATION,
            output_loading_info=True,
        )
    except Exception as error:  # a damaged file raises whatever its parser comes upon
        raise RunError(f"teacher {name}: {first_line(error)}") from error
    model, report = loaded
    # The decoder is tied to the embeddings and its bias to `predictions.bias`: not in old files.
    missing = sorted(key for key in report["missing_keys"] if ".decoder." not in key)
    if any(key.startswith("cls.predictions") for key in missing):
        raise RunError(
            f"teacher {name}: it has no trained masked-language-model head ({missing[0]} is not in "
            "its weights); take a checkpoint saved as BertForMaskedLM or BertForPreTraining"
        )
    if missing or report["mismatched_keys"]:
        odd = missing[0] if missing else sorted(report["mismatched_keys"])[0]
        raise RunError(f"teacher {name}: its weights do not fit its config.json (see {odd})")
    check_vocabulary(f"teacher {name}", source, revision or None, model.config.vocab_size, manifest)
    check_row_length(f"teacher {name}", model.config.max_position_embeddings, manifest)
    model.eval().requires_grad_(False)
    commit = getattr(model.config, "_commit_hash", None)
    return Teacher(model, name, Path(source).exists(), commit, parameters_sha256(model))


def parameters_sha256(model: nn.Module) -> str:
    """A digest of names and values of all parameters: two models agree on it only if equal."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _refuse_config(name: str, raw: dict[str, Any]) -> None:
    """No code, no attention override, and nothing but a BERT (old configs name no model_type)."""
    for key in raw:
        if key == "auto_map" or key.startswith("_attn_implementation"):
            raise RunError(f"teacher {name}: its config.json holds {key!r}, which could run code")
    if raw.get("tie_word_embeddings") is False:
        raise RunError(
            f"teacher {name}: its tie_word_embeddings is false, so its head cannot be copied to a "
            "DistilBERT, whose output embedding is tied"
        )
    if raw.get("model_type", "bert") != "bert":
        raise RunError(
            f"teacher {name}: a {raw['model_type']} cannot be a teacher here; objective distilbert "
            "takes a BERT with a masked-language-model head"
        )


def check_vocabulary(
    who: str, source: str, revision: str | None, vocab_size: int, manifest: Manifest
) -> None:
    """Refuse a model whose words are not those the shards were made with."""
    size = manifest.tokenizer.vocab_size
    if vocab_size != size:
        raise RunError(
            f"{who}: it knows {vocab_size} words, the shards were made with {size}; prepare the "
            "corpus with its tokenizer"
        )
    try:
        words = _vocabulary(source, revision)
    except Exception as error:  # a damaged file raises whatever its parser comes upon
        raise RunError(f"{who}: its tokenizer cannot be read ({first_line(error)})") from error
    if words is None:
        return  # weights without tokenizer files: the size is all there is to compare
    if vocabulary_sha256(words) != manifest.tokenizer.vocabulary_sha256:
        raise RunError(
            f"{who}: its vocabulary has the shards' size but other words; prepare the corpus with "
            "its tokenizer"
        )


def _vocabulary(source: str, revision: str | None) -> list[str] | None:
    """The words in id order, from vocab.txt or else the tokenizer; None where there is neither."""
    folder = Path(source)
    if folder.is_dir():
        if (folder / "vocab.txt").is_file():
            return (folder / "vocab.txt").read_text(encoding="utf-8").rstrip("\n").split("\n")
        if not (folder / "tokenizer.json").is_file():
            return None
    tokenizer = AutoTokenizer.from_pretrained(source, revision=revision)
    ids: dict[str, int] = tokenizer.get_vocab()
    return sorted(ids, key=lambda word: ids[word])
