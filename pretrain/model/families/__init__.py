"""Walk over the layers of an encoder, in the same way for all families of models.

In training and evaluation the walk replaces the forward pass of transformers: documents of a packed
row stay apart, no vocabulary logits are computed, and each layer is called once, in order.

Shapes: B rows, L row length, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pretrain.kernels.attention import Packing
from pretrain.model.families.bert import Bert
from pretrain.model.families.distil_bert import DistilBert
from pretrain.model.families.family import Family, MaskedLM
from pretrain.model.families.modern_bert import ModernBert
from pretrain.model.families.roberta import Camembert, Roberta, XLMRoberta

__all__ = ["FAMILIES", "Family", "MaskedLM", "encode", "family_of", "walk"]

# A new family is a file with a subclass of `Family`, and a line here.
_FAMILIES = (Bert, DistilBert, Roberta, XLMRoberta, Camembert, ModernBert)
FAMILIES: dict[str, Family] = {family.model_type: family() for family in _FAMILIES}


def family_of(model: MaskedLM) -> Family:
    """Return the family of a model of transformers."""
    return FAMILIES[model.config.model_type]


def encode(
    model: MaskedLM, input_ids: Tensor, packing: Packing, *, recompute: bool = False
) -> Tensor:
    """Return the last hidden state [B, L, D] of packed rows [B, L].

    Args:
        model: with a masked-language-model head, which is not computed.
        input_ids: int64.
        packing: where documents begin.
        recompute: keep only each layer's input for the backward pass, which computes the rest
            again with the same random numbers.
    """
    hidden_BLD = family_of(model).embed(model, input_ids, packing)
    return walk(model, hidden_BLD, packing, recompute=recompute)


def walk(
    model: MaskedLM, hidden_BLD: Tensor, packing: Packing, *, recompute: bool = False
) -> Tensor:
    """Run the layers on the output of the embeddings; see `encode`."""
    family = family_of(model)
    # What depends only on the rows is computed once, not in each layer.
    prepared = family.prepare(model, hidden_BLD, packing)
    for i in range(len(family.layers(model))):
        # Evaluation keeps nothing for a backward pass anyway.
        if recompute and torch.is_grad_enabled():
            hidden_BLD = checkpoint(
                family.layer, model, i, hidden_BLD, prepared, use_reentrant=False
            )
        else:
            hidden_BLD = family.layer(model, i, hidden_BLD, prepared)
    return family.finish(model, hidden_BLD)
