"""BERT and DistilBERT seen alike: trunk, MLM transform, output projection.

The heads of `transformers` make full logits inside `forward`; here the parts are called one by one,
so that the fused head can take over after the transform.

Shapes: B rows, L row length, N positions, D width.
"""

from __future__ import annotations

from torch import Tensor
from transformers import BertForMaskedLM, DistilBertForMaskedLM

from pretrain.attention import Segments
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
