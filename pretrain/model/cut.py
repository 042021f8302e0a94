"""Copy a model's weights into a smaller one: of fewer tokens, heads or neurons."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pretrain.model.families import Blocks, family_of

# Of a parameter, by its id: which places of each axis stay; None, or no entry: all.
Cuts = dict[int, tuple[Tensor | None, ...]]


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

    def cuts(self, numbers: Tensor) -> Cuts:
        """Return how its layers are cut to some numbers of its units."""
        places = numbers.nonzero().squeeze(1)
        found: Cuts = {
            id(self.reads.weight): (None, places),
        }
        for linear in self.makes:
            rows = rows_of(linear, numbers).nonzero().squeeze(1)
            found |= {id(linear.weight): (rows,), id(linear.bias): (rows,)}
        return found


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
def cut_into(model: Any, small: Any, cuts: Cuts) -> None:
    """Give a model of the same class the weights, cut, and the buffers of a larger one."""
    names = small.state_dict().keys()
    state = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in state.items():
        for axis, places in enumerate(cuts.get(id(tensor), ())):
            if places is not None:
                tensor = tensor.index_select(axis, places)
        state[name] = tensor
    small.load_state_dict({n: t for n, t in (*state.items(), *model.named_buffers()) if n in names})
    small.tie_weights()


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
