"""Define the student that is not a Transformer: the BiLSTM of Tang et al. (2019, arXiv 1903.12136).

    x = [fixed(w); trained(w)]                            word vectors, or only trained(w)
    h = [LSTM(x, left to right); LSTM(x, right to left)]  of each document
    f = h_last = [left to right at its last token; right to left at its first]
    f = [a; b; |a - b|; a b]    of a pair, where a and b are h_last of its texts (siamese)
    z = W_2 relu(W_1 f + b_1) + b_2

The second text of a pair begins behind the first [SEP], or what stands for it: not every tokenizer
gives the types of tokens. The student reads the pieces of its teacher's tokenizer, so that shards,
cached logits and exports are those of any student; the paper's words are whole. transformers has no
such model: `bi_lstm_heads.py` tells it the classes, and elsewhere it is run as an ONNX file.

The LSTMs are two that read one way each. The second gets each document turned round, so padding
behind a document is read after it, and changes nothing.

Shapes: B rows, L row length, S texts, P tokens of the longest, D width, H width of an LSTM.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

_SIZES = {
    "vocab_size": 30522,
    "embedding_size": 300,
    "hidden_size": 300,
    "num_hidden_layers": 1,
    "intermediate_size": 200,
    "dropout": 0.1,
    "fixed_vectors": False,
    "siamese": False,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "sep_token_id": None,
}


class BiLstmConfig(PretrainedConfig):
    """Hold the sizes of a BiLSTM; `hidden_size` is that of both directions."""

    model_type = "bilstm"

    def __init__(self, **values: Any) -> None:
        super().__init__(**{name: of for name, of in values.items() if name not in _SIZES})
        for name, default in _SIZES.items():
            setattr(self, name, values.get(name, default))
        self.tie_word_embeddings = True
        self.num_attention_heads = 1  # as other configs have it


class BothWays(nn.Module):
    """Run an LSTM in each direction over texts that begin at their first place."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.forwards = nn.LSTM(input_size, hidden_size // 2, batch_first=True)
        self.backwards = nn.LSTM(input_size, hidden_size // 2, batch_first=True)

    def forward(self, x_SPD: Tensor, lengths_S: Tensor) -> Tensor:
        """Return the states [S, P, D]; those behind a text mean nothing."""
        place_P = torch.arange(x_SPD.shape[1], device=x_SPD.device)
        turned_SP = torch.where(
            place_P < lengths_S[:, None], lengths_S[:, None] - 1 - place_P, place_P
        )
        right, left = self.forwards(x_SPD)[0], self.backwards(picked(x_SPD, turned_SP))[0]
        return torch.cat([right, picked(left, turned_SP)], dim=-1)


class BiLstmModel(PreTrainedModel):
    config_class = BiLstmConfig
    base_model_prefix = "bilstm"
    _supports_sdpa = True  # it has no attention that could be another one


class BiLstmEncoder(BiLstmModel):
    """Compute the states of each token from both sides, for padded texts.

    Of a siamese model the two texts of a pair are read apart, and the last number of a state is
    1 in the second one.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        size = config.embedding_size
        self.embeddings = nn.Embedding(config.vocab_size, size)
        self.fixed = nn.Embedding(config.vocab_size, size) if config.fixed_vectors else None
        self.layers = nn.ModuleList()
        for i in range(config.num_hidden_layers):
            width = config.hidden_size if i else size * (1 + config.fixed_vectors)
            self.layers.append(BothWays(width, config.hidden_size))
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the trained word vectors."""
        return self.embeddings

    def embed(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Return the word vectors [B, L, D], of a siamese model with 0 or 1 behind them.

        Without `position_ids` a row is one pair; else pairs follow each other, each from 0 on.
        """
        found = self.embeddings(input_ids)
        if self.fixed is not None:
            found = torch.cat([self.fixed(input_ids).detach(), found], dim=-1)
        if not self.config.siamese:
            return found
        ends_BL = (input_ids == self.config.sep_token_id).long()
        before_BL = ends_BL.cumsum(1) - ends_BL  # how many texts have ended before a token
        if position_ids is not None:
            place_L = torch.arange(input_ids.shape[1], device=input_ids.device)
            before_BL = before_BL - before_BL.gather(1, place_L - position_ids)
        return torch.cat([found, (before_BL > 0)[..., None].to(found.dtype)], dim=-1)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        **_: Any,
    ) -> BaseModelOutputWithPooling:
        """Return the last states [B, L, D]."""
        mask_BL = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        hidden_BLD = self.embed(input_ids)
        first_B = mask_BL.sum(1)
        place_BL = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        if self.config.siamese:
            second_B = (hidden_BLD[..., -1] * mask_BL).sum(1).long()
            first_B = first_B - second_B
        for layer in self.layers:
            values = hidden_BLD[..., :-1] if self.config.siamese else hidden_BLD
            states = layer(values, first_B)
            if self.config.siamese:
                # Read the second text from place 0 on.
                begins_B1 = first_B[:, None]
                moved = (place_BL + begins_B1).clamp(max=input_ids.shape[1] - 1)
                other = layer(picked(values, moved), second_B)
                other = picked(other, (place_BL - begins_B1).clamp(min=0))
                states = torch.where((place_BL < begins_B1)[..., None], states, other)
                states = torch.cat([states, hidden_BLD[..., -1:]], dim=-1)
            hidden_BLD = states
        return BaseModelOutputWithPooling(last_hidden_state=hidden_BLD)


def picked(values_BLD: Tensor, places_BL: Tensor) -> Tensor:
    """Return the values at some places of each text [B, L, D]."""
    return values_BLD.gather(1, places_BL[..., None].expand(-1, -1, values_BLD.shape[-1]))
