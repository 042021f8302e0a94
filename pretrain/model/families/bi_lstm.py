"""Walk over a BiLSTM, the student that is not a Transformer, on packed rows.

Shapes: B rows, L row length, N tokens of a batch, S texts, P tokens of the longest, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from pretrain.contracts.packing import Packing, document_numbers
from pretrain.contracts.terms import Kind
from pretrain.kernels.head import Projection
from pretrain.model.bi_lstm_encoder import BiLstmConfig
from pretrain.model.bi_lstm_heads import BiLstmForMaskedLM
from pretrain.model.families.family import Family


class BiLstm(Family):
    """Walk the layers of a BiLSTM over packed rows."""

    model_type = "bilstm"
    layer_prefix = "bilstm.layers."
    architecture: Any = BiLstmForMaskedLM
    config: Any = BiLstmConfig
    head = ("head.",)
    dropouts: ClassVar[Any] = {"dropout": "dropout"}
    attends = False
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
