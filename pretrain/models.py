"""BERT and DistilBERT seen alike: loading, trunk, MLM transform, output projection.

The heads of `transformers` make full logits inside `forward`; here the parts are called one by one,
so that the fused head can take over after the transform.

Shapes: B rows, L row length, N positions, D width.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import BertForMaskedLM, DistilBertForMaskedLM
from transformers.utils.hub import cached_file

from data_prep.shards import Manifest
from pretrain import RunError
from pretrain.attention import IMPLEMENTATION, Segments
from pretrain.head import Projection

MaskedLM = BertForMaskedLM | DistilBertForMaskedLM


def last_hidden_state(model: MaskedLM, input_ids: Tensor, segments: Segments) -> Tensor:
    """The trunk's output [B, L, D] over packed rows."""
    trunk = model.bert if isinstance(model, BertForMaskedLM) else model.distilbert
    output = trunk(
        input_ids=input_ids,
        attention_mask=segments.attention_mask,
        position_ids=segments.position_ids,
    )
    hidden: Tensor = output.last_hidden_state
    return hidden


def projection(model: MaskedLM, hidden_ND: Tensor) -> Projection:
    """The MLM transform of some positions, with the output embedding and bias."""
    if isinstance(model, BertForMaskedLM):
        head = model.cls.predictions
        return Projection(head.transform(hidden_ND), head.decoder.weight, head.decoder.bias)
    transformed = model.vocab_layer_norm(model.activation(model.vocab_transform(hidden_ND)))
    return Projection(transformed, model.vocab_projector.weight, model.vocab_projector.bias)


def load_model(folder: Path) -> MaskedLM:
    """A BERT or DistilBERT with its MLM head, as a run saved it, in fp32.

    Raises:
        RunError: it cannot be read, is neither, or has no such head.
    """
    kinds: dict[str, Any] = {"bert": BertForMaskedLM, "distilbert": DistilBertForMaskedLM}
    kind = read_config(str(folder), str(folder), None).get("model_type")
    if kind not in kinds:
        raise RunError(f"{folder}: a {kind} model; only {' and '.join(kinds)} can be used here")
    try:
        model, report = kinds[kind].from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation=IMPLEMENTATION,
            output_loading_info=True,
        )
    except Exception as error:  # a damaged file raises whatever its parser comes upon
        raise RunError(f"{folder}: {first_line(error)}") from error
    if report["missing_keys"]:
        raise RunError(
            f"{folder}: its weights lack {sorted(report['missing_keys'])[0]}; it must be saved "
            f"with its masked-language-model head, as {kinds[kind].__name__}"
        )
    loaded: MaskedLM = model
    return loaded


def read_config(who: str, source: str, revision: str | None) -> dict[str, Any]:
    """The config.json of a folder or hub name; `who` opens the message if there is none."""
    try:
        path = cached_file(source, "config.json", revision=revision)
    except (OSError, ValueError) as error:
        if source.count("/") > 1 or source.startswith((".", "/", "~")) or Path(source).is_dir():
            raise RunError(f"{who}: there is no {source}/config.json; check the path") from error
        raise RunError(
            f"{who}: no such folder here, and the hub does not give it ({first_line(error)}); "
            "check the name, or give the path of a folder"
        ) from error
    try:
        raw: dict[str, Any] = json.loads(Path(str(path)).read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(raw, dict):
        raise RunError(f"{path}: not a JSON object")
    return raw


def check_row_length(who: str, max_position_embeddings: int, manifest: Manifest) -> None:
    """Refuse rows that are longer than a model's positions."""
    if manifest.row_length > max_position_embeddings:
        raise RunError(
            f"{who}: rows of {manifest.row_length} tokens need as many positions, but "
            f"max_position_embeddings is {max_position_embeddings}; prepare the corpus with "
            f"row_length: {max_position_embeddings}"
        )


def first_line(error: Exception) -> str:
    """What a library said, without the rest of the page."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
