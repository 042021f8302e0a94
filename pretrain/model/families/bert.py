"""Name the parts of BERT, and of RoBERTa's layers, which have the same names."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from transformers import BertConfig, BertForMaskedLM

from pretrain.kernels.head import Projection
from pretrain.model.families.post_norm import Parts, PostNorm


class Bert(PostNorm):
    """Name the parts of a `BertForMaskedLM`."""

    model_type = "bert"
    layer_prefix = "bert.encoder.layer."
    architecture: Any = BertForMaskedLM
    config: Any = BertConfig
    head: tuple[str, ...] = ("cls.predictions.",)
    dropouts: ClassVar[Any] = {
        "hidden_dropout_prob": "dropout",
        "attention_probs_dropout_prob": "attention_dropout",
    }

    def parts(self, model: Any, index: int) -> Parts:
        """Return the parts of a layer."""
        layer: Any = self.layers(model)[index]
        attention, output = layer.attention.self, layer.attention.output
        return Parts(
            query=attention.query,
            key=attention.key,
            value=attention.value,
            out=output.dense,
            attention_norm=output.LayerNorm,
            up=layer.intermediate.dense,
            down=layer.output.dense,
            norm=layer.output.LayerNorm,
            activation=layer.intermediate.intermediate_act_fn,
            num_heads=attention.num_attention_heads,
            attention_dropout=attention.dropout,
            out_dropout=output.dropout,
            down_dropout=layer.output.dropout,
        )

    def projection(self, model: Any, hidden_ND: Tensor) -> Projection:
        """Return the MLM transform of some positions, with weight and bias of the LM head."""
        # The decoder's weight is that of the word embeddings.
        head = model.cls.predictions
        return Projection(head.transform(hidden_ND), head.decoder.weight, head.decoder.bias)
