"""Define the heads of a BiLSTM, and tell transformers of its classes.

Shapes: B texts, L tokens, D width, C classes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)
from transformers.modeling_outputs import MaskedLMOutput, SequenceClassifierOutput

from pretrain.model.bi_lstm_encoder import BiLstmConfig, BiLstmEncoder, BiLstmModel, picked


class BiLstmForMaskedLM(BiLstmModel):
    """Hold an encoder with an LM head, whose matrix is that of the trained word vectors."""

    _tied_weights_keys = {"head.decoder.weight": "bilstm.embeddings.weight"}  # noqa: RUF012

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bilstm = BiLstmEncoder(config)
        self.head = nn.ModuleDict(
            {
                "dense": nn.Linear(config.hidden_size, config.embedding_size),
                "decoder": nn.Linear(config.embedding_size, config.vocab_size),
            }
        )
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        """Return the decoder."""
        return self.head["decoder"]

    def set_output_embeddings(self, new: nn.Module) -> None:
        """Replace the decoder."""
        self.head["decoder"] = new

    def transform(self, hidden: Tensor) -> Tensor:
        """Return the states as the decoder reads them [..., D]."""
        states = hidden[..., :-1] if self.config.siamese else hidden
        return torch.tanh(self.head["dense"](states))

    def forward(self, input_ids: Tensor, **inputs: Any) -> MaskedLMOutput:
        """Return the logits of the vocabulary."""
        hidden = self.bilstm(input_ids, **inputs).last_hidden_state
        return MaskedLMOutput(logits=self.head["decoder"](self.transform(hidden)))


class BiLstmForSequenceClassification(BiLstmModel):
    """Hold an encoder with the paper's classifier."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bilstm = BiLstmEncoder(config)
        width = config.hidden_size * (4 if config.siamese else 1)
        self.dense = nn.Linear(width, config.intermediate_size)
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = nn.Linear(config.intermediate_size, config.num_labels)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **_: Any,
    ) -> SequenceClassifierOutput:
        """Return the logits [B, C]."""
        found = self.bilstm(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
        )
        hidden_BLD = found.last_hidden_state
        if attention_mask is None:
            attention_mask = torch.ones(hidden_BLD.shape[:2], device=hidden_BLD.device)
        ends_B = attention_mask.long().sum(1)
        if self.config.siamese:
            second_BL, hidden_BLD = hidden_BLD[..., -1].float(), hidden_BLD[..., :-1]
            begins_B = ends_B - (second_BL * attention_mask).sum(1).long()
            a, b = last(hidden_BLD, begins_B * 0, begins_B), last(hidden_BLD, begins_B, ends_B)
            b = b * (ends_B > begins_B)[:, None]  # 0 without a second text
            features = torch.cat([a, b, (a - b).abs(), a * b], dim=-1)
        else:
            features = last(hidden_BLD, ends_B * 0, ends_B)
        hidden = self.dropout(torch.relu(self.dense(features)))
        return SequenceClassifierOutput(logits=self.classifier(hidden))


def last(hidden_BLD: Tensor, begins_B: Tensor, ends_B: Tensor) -> Tensor:
    """Return the state of each direction after a text [B, D]."""
    half = hidden_BLD.shape[-1] // 2
    right = picked(hidden_BLD[..., :half], (ends_B - 1).clamp(min=0)[:, None])
    left = picked(hidden_BLD[..., half:], torch.minimum(begins_B, ends_B - 1).clamp(min=0)[:, None])
    return torch.cat([right, left], dim=-1)[:, 0]


AutoConfig.register("bilstm", BiLstmConfig, exist_ok=True)
AutoModel.register(BiLstmConfig, BiLstmEncoder, exist_ok=True)
AutoModelForMaskedLM.register(BiLstmConfig, BiLstmForMaskedLM, exist_ok=True)
AutoModelForSequenceClassification.register(
    BiLstmConfig, BiLstmForSequenceClassification, exist_ok=True
)
