"""Name the parts of DistilBERT: a BERT without token types, and without dropout after attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor
from transformers import DistilBertConfig, DistilBertForMaskedLM

from pretrain.contracts.terms import DISTILBERT_NAMES
from pretrain.kernels.head import Projection
from pretrain.model.families.post_norm import Parts, PostNorm


class DistilBert(PostNorm):
    """Name the parts of a `DistilBertForMaskedLM`."""

    model_type = "distilbert"
    layer_prefix = "distilbert.transformer.layer."
    architecture: Any = DistilBertForMaskedLM
    config: Any = DistilBertConfig
    head = ("vocab_",)
    dropouts: ClassVar[Any] = {
        "dropout": "dropout",
        "attention_dropout": "attention_dropout",
    }
    own_names: ClassVar[Any] = DISTILBERT_NAMES

    def parts(self, model: Any, index: int) -> Parts:
        """Return the parts of a layer."""
        layer: Any = self.layers(model)[index]
        return Parts(
            query=layer.attention.q_lin,
            key=layer.attention.k_lin,
            value=layer.attention.v_lin,
            out=layer.attention.out_lin,
            attention_norm=layer.sa_layer_norm,
            up=layer.ffn.lin1,
            down=layer.ffn.lin2,
            norm=layer.output_layer_norm,
            activation=layer.ffn.activation,
            num_heads=layer.attention.n_heads,
            attention_dropout=layer.attention.dropout,
            out_dropout=None,  # BERT has one here
            down_dropout=layer.ffn.dropout,
        )

    def student_config(
        self, teacher: Any, changes: Mapping[str, float], copied: Sequence[int] = ()
    ) -> Any:
        """Return the config of a DistilBERT for a BERT or DistilBERT teacher."""
        if teacher.model_type == self.model_type:
            return super().student_config(teacher, changes, copied)
        changes = {name: getattr(teacher, name) for name in self.own_names} | dict(changes)
        # The rest of a DistilBERT's config has no counterpart in BERT's.
        values: dict[str, Any] = {
            "vocab_size": teacher.vocab_size,
            "max_position_embeddings": teacher.max_position_embeddings,
            "activation": teacher.hidden_act,
            "pad_token_id": teacher.pad_token_id,
            **{self.own_names.get(name, name): value for name, value in changes.items()},
        }
        return DistilBertConfig(**values)

    def projection(self, model: Any, hidden_ND: Tensor) -> Projection:
        """Return the MLM transform of some positions, with weight and bias of the LM head."""
        transformed = model.vocab_layer_norm(model.activation(model.vocab_transform(hidden_ND)))
        return Projection(transformed, model.vocab_projector.weight, model.vocab_projector.bias)
