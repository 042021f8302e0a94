"""Name the parts of RoBERTa, XLM-RoBERTa and CamemBERT: BERT's layers, another count of positions.

Positions begin after the id of padding (at 2 in all published models), so a model with 514
positions takes rows of 512 tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn.functional import gelu
from transformers import (
    CamembertConfig,
    CamembertForMaskedLM,
    RobertaConfig,
    RobertaForMaskedLM,
    XLMRobertaConfig,
    XLMRobertaForMaskedLM,
)

from pretrain.kernels.head import Projection
from pretrain.model.families.bert import Bert


class Roberta(Bert):
    """Name the parts of a `RobertaForMaskedLM`."""

    model_type = "roberta"
    layer_prefix = "roberta.encoder.layer."
    architecture: Any = RobertaForMaskedLM
    config: Any = RobertaConfig
    head = ("lm_head.",)
    begins_after_padding = True

    def new_config(self, values: Mapping[str, Any], special: Mapping[str, int]) -> Any:
        """Return the config of a new model, with positions for the ids up to padding."""
        positions = values["max_position_embeddings"] + special["pad"] + 1
        return self.config(
            **{**values, "max_position_embeddings": positions, "type_vocab_size": 1},
            pad_token_id=special["pad"],
            bos_token_id=special["cls"],
            eos_token_id=special["sep"],
        )

    def projection(self, model: Any, hidden_ND: Tensor) -> Projection:
        """Return the MLM transform of some positions, with weight and bias of the LM head."""
        head = model.lm_head
        # Its forward pass would compute logits of all positions; this is the part before them.
        transformed = head.layer_norm(gelu(head.dense(hidden_ND)))
        return Projection(transformed, head.decoder.weight, head.decoder.bias)


class XLMRoberta(Roberta):
    """Name the parts of an `XLMRobertaForMaskedLM`."""

    model_type = "xlm-roberta"
    architecture: Any = XLMRobertaForMaskedLM
    config: Any = XLMRobertaConfig


class Camembert(Roberta):
    """Name the parts of a `CamembertForMaskedLM`."""

    model_type = "camembert"
    architecture: Any = CamembertForMaskedLM
    config: Any = CamembertConfig
