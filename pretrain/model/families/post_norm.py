"""Compute a layer of an encoder that normalises after each sum: BERT, DistilBERT, RoBERTa.

    attended = norm(hidden + out(attention(query, key, value)))
    hidden   = norm(attended + down(activation(up(attended))))

The operators and their order are those of transformers, so results are equal bit for bit.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from pretrain.contracts.packing import Packing
from pretrain.contracts.terms import Kind
from pretrain.kernels.attention import attend
from pretrain.model.families.family import Blocks, Family


class Parts(NamedTuple):
    """Name the parts of a layer; the first eight have weights."""

    query: nn.Module
    key: nn.Module
    value: nn.Module
    out: nn.Module
    attention_norm: nn.Module
    up: nn.Module
    down: nn.Module
    norm: nn.Module
    activation: Callable[[Tensor], Tensor]
    num_heads: int
    attention_dropout: nn.Dropout
    out_dropout: nn.Module | None
    down_dropout: nn.Module


class PostNorm(Family):
    """Walk a post-norm layer by its `parts`."""

    def embed(
        self, model: Any, input_ids: Tensor, packing: Packing, types: Tensor | None = None
    ) -> Tensor:
        """Return the output of the embeddings [B, L, D]."""
        positions, first = packing.position_ids, self.first_position(model.config)
        if first:
            positions = positions + first
        # Without token types, transformers takes type 0.
        more = {}
        if types is not None and self.has_types(model.config):
            more = {"token_type_ids": types.long()}
        embedded: Tensor = model.base_model.embeddings(
            input_ids=input_ids, position_ids=positions, **more
        )
        return embedded

    @abstractmethod
    def parts(self, model: Any, index: int) -> Parts:
        """Return the parts of a layer."""

    def blocks(self, model: Any, index: int) -> Blocks:
        """Return the linear layers of a layer."""
        part: Any = self.parts(model, index)
        return Blocks((part.query, part.key, part.value), part.out, part.up, part.down)

    def layer(
        self, model: Any, index: int, hidden: Tensor, packing: Packing, kinds: frozenset[Kind]
    ) -> dict[Kind, Tensor]:
        """Return the output of one layer, and the signals of these kinds."""
        part = self.parts(model, index)
        query, key, value = part.query(hidden), part.key(hidden), part.value(hidden)
        # Signals are values, not hooks.
        outputs: dict[Kind, Tensor] = {"query": query, "key": key, "value": value}
        outputs = {kind: outputs[kind] for kind in kinds if kind in outputs}
        dropout = part.attention_dropout.p if model.training else 0.0
        context = attend(query, key, value, packing, part.num_heads, dropout)
        # A teacher has no graph: what no name holds is free before the widest tensors are made.
        del query, key, value
        out = part.out(context)
        del context
        if part.out_dropout is not None:
            out = part.out_dropout(out)
        attended = part.attention_norm(out + hidden)
        del out
        inner = part.down_dropout(part.down(part.activation(part.up(attended))))
        outputs["hidden"] = part.norm(inner + attended)
        return outputs
