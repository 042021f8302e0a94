"""Call the parts of BERT and DistilBERT in the same way: encoder, MLM transform, LM head.

The heads of `transformers` compute full logits inside `forward`. Here the parts are called one by
one, so that the fused LM head can continue after the transform.

Shapes: B rows, L row length, N positions, D width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import BertForMaskedLM, DistilBertForMaskedLM

from pretrain.kernels.attention import IMPLEMENTATION, Packing
from pretrain.kernels.head import Projection

MaskedLM = BertForMaskedLM | DistilBertForMaskedLM


def last_hidden_state(model: MaskedLM, input_ids: Tensor, packing: Packing) -> Tensor:
    """Return the encoder's output [B, L, D] for packed rows.

    Raises:
        ValueError: the model has another attention, in which documents would mix.
    """
    if model.config._attn_implementation != IMPLEMENTATION:
        raise ValueError(
            f"its attention is {model.config._attn_implementation!r}, which knows no segments: "
            f"load it with attn_implementation={IMPLEMENTATION!r}"
        )
    # Extra arguments reach the attention of every layer: `cu_seqlens` keeps documents apart.
    output = encoder(model)(
        input_ids=input_ids,
        position_ids=packing.position_ids,
        cu_seqlens=packing.cu_seqlens,
    )
    hidden: Tensor = output.last_hidden_state
    return hidden


def projection(model: MaskedLM, hidden_ND: Tensor) -> Projection:
    """Return the MLM transform of some positions, with weight and bias of the LM head."""
    if isinstance(model, BertForMaskedLM):
        head = model.cls.predictions
        return Projection(head.transform(hidden_ND), head.decoder.weight, head.decoder.bias)
    transformed = model.vocab_layer_norm(model.activation(model.vocab_transform(hidden_ND)))
    return Projection(transformed, model.vocab_projector.weight, model.vocab_projector.bias)


def encoder(model: MaskedLM) -> Any:
    """Return the encoder of a masked language model."""
    return model.bert if isinstance(model, BertForMaskedLM) else model.distilbert


def recompute_activations(model: MaskedLM) -> None:
    """Keep only each layer's input in a training pass; backward computes the rest again.

    The same random numbers are drawn again, so gradients are identical bit for bit.
    """
    # The newer name where it exists: the older one warns then. Evaluation is not affected.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
