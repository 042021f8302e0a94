"""BERT and DistilBERT seen alike: trunk, MLM transform, output projection.

The heads of `transformers` make full logits inside `forward`; here the parts are called one by one,
so that the fused head can take over after the transform.

Shapes: B rows, L row length, N positions, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import BertForMaskedLM, DistilBertForMaskedLM

from pretrain.kernels.attention import IMPLEMENTATION, Packing
from pretrain.kernels.head import Projection

MaskedLM = BertForMaskedLM | DistilBertForMaskedLM


def last_hidden_state(model: MaskedLM, input_ids: Tensor, packing: Packing) -> Tensor:
    """Return the trunk's output [B, L, D] over packed rows.

    Raises:
        ValueError: a model with another attention, in which documents would mix.
    """
    if model.config._attn_implementation != IMPLEMENTATION:
        raise ValueError(
            f"its attention is {model.config._attn_implementation!r}, which knows no segments: "
            f"load it with attn_implementation={IMPLEMENTATION!r}"
        )
    output = _trunk(model)(
        input_ids=input_ids,
        position_ids=packing.position_ids,
        cu_seqlens=packing.cu_seqlens,
    )
    hidden: Tensor = output.last_hidden_state
    return hidden


def projection(model: MaskedLM, hidden_ND: Tensor) -> Projection:
    """Return the MLM transform of some positions, with the output embedding and bias."""
    if isinstance(model, BertForMaskedLM):
        head = model.cls.predictions
        return Projection(head.transform(hidden_ND), head.decoder.weight, head.decoder.bias)
    transformed = model.vocab_layer_norm(model.activation(model.vocab_transform(hidden_ND)))
    return Projection(transformed, model.vocab_projector.weight, model.vocab_projector.bias)


def keep_embeddings_eager(model: MaskedLM) -> None:
    """Leave the embeddings out of compiled graphs.

    The code that the compiler makes for their backward pass adds rows up in whatever order threads
    come to them (torch 2.13, also with its `deterministic`): no two runs would have the same bits.
    """
    embeddings = _trunk(model).embeddings
    embeddings.forward = torch.compiler.disable(embeddings.forward)


def _trunk(model: MaskedLM) -> Any:
    return model.bert if isinstance(model, BertForMaskedLM) else model.distilbert


def recompute_activations(model: MaskedLM) -> None:
    """Keep each layer's input alone in a training pass; backward computes the rest once more.

    Random numbers are drawn again as they were, so gradients are the same bit for bit.
    """
    # The newer name where there is one: beside it the older warns. No layer does it in evaluation.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
