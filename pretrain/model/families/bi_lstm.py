"""Define the student that is not a Transformer: the BiLSTM of Tang et al. (2019, arXiv 1903.12136).

    x = [fixed(w); trained(w)]                            word vectors, or only trained(w)
    h = [LSTM(x, left to right); LSTM(x, right to left)]  of each document
    f = h_last = [left to right at its last token; right to left at its first]
    f = [a; b; |a - b|; a b]    of a pair, where a and b are h_last of its texts (siamese)
    z = W_2 relu(W_1 f + b_1) + b_2

The second text of a pair begins behind the first [SEP], or what stands for it: not every tokenizer
gives the types of tokens. The student reads the pieces of its teacher's tokenizer, so that shards,
cached logits and exports are those of any student; the paper's words are whole. transformers has no
such model: this file tells it the classes, and elsewhere it is run as an ONNX file.

The LSTMs are two that read one way each. The second gets each document turned round, so padding
behind a document is read after it, and changes nothing.

Shapes: B rows or texts, L row length, N tokens of a batch, S texts, P tokens of the longest, D
width, H width of an LSTM, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import (
    BaseModelOutputWithPooling,
    MaskedLMOutput,
    SequenceClassifierOutput,
)

from pretrain.contracts.packing import Packing, document_numbers
from pretrain.contracts.terms import Kind
from pretrain.kernels.head import Projection
from pretrain.model.families.family import Family

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


class BiLstm(Family):
    """Walk the layers of a BiLSTM over packed rows."""

    model_type = "bilstm"
    layer_prefix = "bilstm.layers."
    architecture: Any = BiLstmForMaskedLM
    config: Any = BiLstmConfig
    head = ("head.",)
    dropouts: ClassVar[Any] = {"dropout": "dropout"}
    attends = False
    outputs = ("classes", "score")
    imports = "import pretrain.model.families  # tells transformers what a BiLSTM is\n"

    def embed(
        self, model: Any, input_ids: Tensor, packing: Packing, types: Tensor | None = None
    ) -> Tensor:
        """Return the word vectors [B, L, D]."""
        found: Tensor = model.bilstm.embed(input_ids, packing.position_ids)
        return found

    def prepare(self, model: Any, hidden: Tensor, packing: Packing) -> Any:
        """Return where each text is: its places [S, P], its length, and its number and place."""
        num = hidden.shape[0] * hidden.shape[1]
        index_N = torch.arange(num, device=hidden.device)
        begins_S = packing.cu_seqlens[:-1].long()
        if model.config.siamese:  # each text is one, and the second begins where 0 becomes 1
            second_N = hidden[..., -1].flatten() > 0
            begins_N = packing.position_ids.flatten() == 0
            begins_N[1:] |= second_N[1:] & ~second_N[:-1]
            begins_S = begins_N.nonzero().squeeze(1)
        ends_S = torch.cat([begins_S[1:], begins_S.new_tensor([num])])
        number_N = document_numbers(torch.cat([begins_S, ends_S[-1:]]), index_N)
        place_SP = begins_S[:, None] + torch.arange(packing.max_length, device=hidden.device)
        return (
            place_SP.clamp(max=num - 1),
            ends_S - begins_S,
            number_N,
            index_N - begins_S[number_N],
        )

    def layer(
        self, model: Any, index: int, hidden: Tensor, prepared: Any, kinds: frozenset[Kind]
    ) -> dict[Kind, Tensor]:
        """Return the states of both directions."""
        place_SP, lengths_S, number_N, within_N = prepared
        siamese = model.config.siamese
        values_ND = (hidden[..., :-1] if siamese else hidden).flatten(0, 1)
        states_SPD = model.bilstm.layers[index](values_ND[place_SP], lengths_S)
        states = states_SPD[number_N, within_N].view(*hidden.shape[:2], -1)
        if siamese:
            states = torch.cat([states, hidden[..., -1:].to(states.dtype)], dim=-1)
        return {"hidden": states}

    def projection(self, model: Any, hidden_ND: Tensor) -> Projection:
        """Return the transform of some positions, with weight and bias of the LM head."""
        decoder = model.head["decoder"]
        return Projection(model.transform(hidden_ND), decoder.weight, decoder.bias)

    def student_config(
        self, teacher: Any, changes: Mapping[str, Any], copied: Any = ()
    ) -> BiLstmConfig:
        """Return the config of a BiLSTM that reads a teacher's tokens."""
        known = {k: v for k, v in changes.items() if k != "num_attention_heads"}
        return BiLstmConfig(
            **{
                "vocab_size": teacher.vocab_size,
                "max_position_embeddings": teacher.max_position_embeddings,
                "pad_token_id": teacher.pad_token_id,
                **known,
            }
        )

    def initialise(self, model: Any, seed: int) -> None:
        """Draw word vectors in -0.25 to 0.25, and the LSTMs as torch does."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            model.bilstm.embeddings.weight.uniform_(-0.25, 0.25, generator=generator)
            bound = (model.config.hidden_size // 2) ** -0.5
            for _, parameter in sorted(model.bilstm.layers.named_parameters()):
                parameter.uniform_(-bound, bound, generator=generator)
