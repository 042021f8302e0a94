"""Take heads and neurons out of a model.

No class of transformers loads layers of different sizes, or fewer heads of the same width. So all
layers keep as many neurons, and a head that goes becomes zeros: its query, key and value, and what
reads it. Their gradients are then zero, too, so that it stays out when the model is trained on.
`cut_zero_heads` takes such heads out for good, for a file that no class has to load.

Shapes: N layers, A heads, F neurons.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pretrain.model.families import FAMILIES, Blocks, family_of


class Units(NamedTuple):
    """Hold a value, or whether it stays, for each head [N, A] and each neuron [N, F]."""

    heads: Tensor
    neurons: Tensor


class Way(NamedTuple):
    """Hold the linear layers that make the units of a layer, and the one that reads them."""

    makes: tuple[nn.Linear, ...]  # its rows are all units side by side, once or several times
    reads: nn.Linear
    num: int

    @property
    def width(self) -> int:
        """Return how many numbers a unit is."""
        return self.reads.in_features // self.num

    def squares(self) -> Tensor:
        """Return the sum of the squares of all weights that make or read each number of a unit."""
        found = self.reads.weight.square().sum(0).view(self.num, self.width)
        for linear in self.makes:
            found = found + linear.weight.square().sum(1).view(-1, *found.shape).sum(0)
        return found

    def numbers(self, kept: Tensor) -> Tensor:
        """Return which of all numbers belong to some units."""
        return kept.repeat_interleave(self.width)


def rows_of(linear: nn.Linear, numbers: Tensor) -> Tensor:
    """Return which rows of a layer make some of a way's numbers."""
    return numbers.repeat(linear.out_features // len(numbers))


def ways(model: PreTrainedModel) -> Iterator[tuple[Way, Way]]:
    """Yield the ways through the heads and through the neurons of each layer."""
    family: Any = family_of(model)
    for i in range(len(family.layers(model))):
        block: Blocks = family.blocks(model, i)
        yield (
            Way(block.into_heads, block.out_of_heads, model.config.num_attention_heads),
            Way((block.into_neurons,), block.out_of_neurons, block.out_of_neurons.in_features),
        )


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
    tensors: dict[int, Tensor] = {}
    for (heads, neurons), stay, left in zip(ways(model), *kept, strict=True):
        for way, some, keep in ((heads, stay, _zeroed), (neurons, left, _cut)):
            numbers = way.numbers(some)
            for linear in way.makes:
                rows = rows_of(linear, numbers)
                tensors |= {id(p): keep(p, rows, 0) for p in linear.parameters()}
            tensors[id(way.reads.weight)] = keep(way.reads.weight, numbers, 1)
    state = {
        key: tensors.get(id(tensor), tensor)
        for key, tensor in model.named_parameters(remove_duplicate=False)
    }
    state |= {key: tensor for key, tensor in model.named_buffers() if key in found.state_dict()}
    found.load_state_dict(state)
    found.tie_weights()
    return found.eval()


def _zeroed(tensor: Tensor, kept: Tensor, dim: int) -> Tensor:
    return tensor * kept.view(-1, *[1] * (tensor.dim() - 1 - dim))


def _cut(tensor: Tensor, kept: Tensor, dim: int) -> Tensor:
    return tensor.index_select(dim, kept.nonzero().squeeze(1))


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
                setattr(linear, name, nn.Parameter(_cut(parameter, rows, 0)))
            linear.out_features = len(linear.weight)
        way.reads.weight = nn.Parameter(_cut(way.reads.weight, numbers, 1))
        way.reads.in_features = way.reads.weight.shape[1]
    return cut
