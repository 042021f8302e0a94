"""Walk over the layers of an encoder, in the same way for all families of models.

In training and evaluation the walk replaces the forward pass of transformers: documents of a packed
row stay apart, and no vocabulary logits are computed. It returns the last hidden state, and the
signals that were asked for, as values.

Shapes: B rows, L row length, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pretrain.contracts.packing import Packing
from pretrain.contracts.terms import Encoded, Kind, Shape, Signal
from pretrain.model.families.bert import Bert
from pretrain.model.families.bi_lstm import BiLstm
from pretrain.model.families.distil_bert import DistilBert
from pretrain.model.families.family import Family, MaskedLM
from pretrain.model.families.modern_bert import ModernBert
from pretrain.model.families.roberta import Camembert, Roberta, XLMRoberta

# A new family is a file with a subclass of `Family`, and a line here.
_FAMILIES = (Bert, DistilBert, Roberta, XLMRoberta, Camembert, ModernBert, BiLstm)
FAMILIES: dict[str, Family] = {family.model_type: family() for family in _FAMILIES}


def family_of(model: MaskedLM) -> Family:
    """Return the family of a model of transformers."""
    return FAMILIES[model.config.model_type]


def encode(
    model: MaskedLM,
    input_ids: Tensor,
    packing: Packing,
    needs: frozenset[Signal] = frozenset(),
    *,
    types: Tensor | None = None,
    recompute: bool = False,
    other: MaskedLM | None = None,
    running: Sequence[bool] | None = None,
) -> Encoded:
    """Run a model's encoder on packed rows [B, L].

    Args:
        model: with a masked-language-model head, which is not computed.
        input_ids: int64.
        packing: where documents begin.
        needs: the signals to return.
        types: the tokens' types [B, L], of a family that has several.
        recompute: keep only each layer's input for the backward pass, which computes the rest
            again with the same random numbers.
        other: a model of the same family and width, with a multiple of the layers.
        running: which layers run; where one does not, its share of the other's layers does.
    """
    family = family_of(model)
    hidden_BLD = family.embed(model, input_ids, packing, types)
    # What depends only on the rows is computed once, not in each layer.
    prepared = family.prepare(model, hidden_BLD, packing)
    layers = [(model, i, prepared) for i in range(len(family.layers(model)))]
    if other is not None and running is not None and not all(running):
        each = len(family.layers(other)) // len(layers)
        # Prepared anew: its layers may be of kinds that the model has not.
        shared = family.prepare(other, hidden_BLD, packing)
        theirs = ([(other, i * each + j, shared) for j in range(each)] for i in range(len(layers)))
        layers = [
            layer
            for own, block, runs in zip(layers, theirs, running, strict=True)
            for layer in ([own] if runs else block)
        ]
    embedded = Signal("hidden", -1)
    found = {embedded: hidden_BLD} if embedded in needs else {}
    for source, i, prepared in layers:
        # A layer returns only what is asked for, so a teacher's other activations are freed
        # immediately.
        kinds = frozenset(signal.kind for signal in needs if signal.layer == i)
        # Evaluation keeps nothing for a backward pass anyway.
        if recompute and torch.is_grad_enabled():
            outputs: dict[Kind, Tensor] = checkpoint(
                family.layer, source, i, hidden_BLD, prepared, kinds, use_reentrant=False
            )
        else:
            outputs = family.layer(source, i, hidden_BLD, prepared, kinds)
        hidden_BLD = outputs["hidden"]
        for kind in kinds:
            found[Signal(kind, i)] = outputs[kind]
    assert len(found) == len(needs), "a signal of a layer that the model does not have"
    return Encoded(family.finish(model, hidden_BLD), found)


def has_types(model: MaskedLM) -> bool:
    """Return whether a model tells the second text of a pair by the types of its tokens."""
    return family_of(model).has_types(model.config)


def shape_of(model: MaskedLM) -> Shape:
    """Return the sizes of a model's encoder."""
    config: Any = model.config
    return Shape(config.num_hidden_layers, config.hidden_size, config.num_attention_heads)
