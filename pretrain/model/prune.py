"""Take heads and neurons out of a model.

No class of transformers loads layers of different sizes, or fewer heads of the same width. So all
layers keep as many neurons, and a head that goes becomes zeros: its query, key and value, and what
reads it. Their gradients are then zero, too, so that it stays out when the model is trained on.
`cut_zero_heads` takes such heads out for good, for a file that no class has to load.

Shapes: N layers, A heads, F neurons.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pretrain.model.cut import Cuts, cut_into, rows_of, ways
from pretrain.model.families import FAMILIES, family_of


class Units(NamedTuple):
    """Hold a value, or whether it stays, for each head [N, A] and each neuron [N, F]."""

    heads: Tensor
    neurons: Tensor


@torch.no_grad()
def magnitudes(model: PreTrainedModel) -> Units:
    """Return the norm of all weights that make or read a head or a neuron."""

    found = zip(
        *([way.squares().sum(1).sqrt() for way in both] for both in ways(model)), strict=True
    )
    return Units(*(torch.stack(layers).cpu() for layers in found))


@torch.no_grad()
def pruned_model(model: PreTrainedModel, kept: Units) -> PreTrainedModel:
    """Return a model of the same class with the kept neurons, as many in each layer.

    The heads that are not kept are zeros.
    """
    config = copy.deepcopy(model.config)
    name = FAMILIES[config.model_type].own_names.get("intermediate_size", "intermediate_size")
    setattr(config, name, int(kept.neurons[0].sum()))
    found = type(model)(config)
    cuts: Cuts = {}
    for (_, neurons), stay in zip(ways(model), kept.neurons, strict=True):
        cuts |= neurons.cuts(stay)
    cut_into(model, found, cuts)
    for (heads, _), stay in zip(ways(found), kept.heads, strict=True):
        gone = heads.numbers(~stay)
        heads.reads.weight[:, gone] = 0
        for linear in heads.makes:
            for parameter in linear.parameters():
                parameter[rows_of(linear, gone)] = 0
    return found.eval()


@torch.no_grad()
def cut_zero_heads(model: PreTrainedModel) -> int:
    """Take the heads out that nothing reads, at least one of a layer stays; return their number.

    The model computes the same, and its config says more heads than it has.
    """
    if not family_of(model).attends:
        return 0
    cut = 0
    for way, _ in ways(model):
        kept = way.reads.weight.view(-1, way.num, way.width).ne(0).any(2).any(0)
        kept[0] |= not kept.any()
        cut += int((~kept).sum())
        numbers = way.numbers(kept)
        for linear in way.makes:
            rows = rows_of(linear, numbers)
            for name, parameter in [*linear.named_parameters()]:
                setattr(linear, name, nn.Parameter(parameter[rows]))
            linear.out_features = len(linear.weight)
        way.reads.weight = nn.Parameter(way.reads.weight[:, numbers])
        way.reads.in_features = way.reads.weight.shape[1]
    return cut
