"""Fill a narrower student with the largest weights of a model of as many layers.

Of the hidden state those numbers stay whose weights in all layers together have the largest sum of
squares; in each layer those heads, in each head those numbers, and those neurons. All keep their
order, and the rest of the model is cut to the same numbers of the hidden state. Nothing is exact: a
sum of fewer products is smaller, which the norms make good for the most part.

Shapes: D width of the model, d width of the student.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pretrain import RunError
from pretrain.model.prune import Way, rows_of, ways


@torch.no_grad()
def project(model: Any, student: Any) -> None:
    """Copy a model's weights into a student of the same family and depth, of at most its width.

    Raises:
        RunError: it is wider, or its positions are angles of a head's numbers and its heads are
            narrower.
    """
    both = [*zip(ways(model), ways(student), strict=True)]
    squares_D = torch.zeros(model.config.hidden_size)
    for layer, _ in both:
        for way in layer:
            squares_D += way.reads.weight.square().sum(1)
            squares_D += sum(linear.weight.square().sum(0) for linear in way.makes)
    hidden = largest(squares_D, student.config.hidden_size)
    done = set[int]()
    for layer, own in both:
        for way, small in zip(layer, own, strict=True):
            if small.width != way.width and hasattr(model.config, "rope_parameters"):
                raise RunError(
                    f"student: its heads have {small.width} numbers, the teacher's {way.width}, "
                    "which are turned by positions; change num_attention_heads or hidden_size"
                )
            numbers = chosen(way, small)
            for linear, target in zip(way.makes, small.makes, strict=True):
                rows = rows_of(linear, numbers)
                target.weight.copy_(linear.weight[rows][:, hidden])
                if linear.bias is not None:
                    target.bias.copy_(linear.bias[rows])
            small.reads.weight.copy_(way.reads.weight[hidden][:, numbers])
            if way.reads.bias is not None:
                small.reads.bias.copy_(way.reads.bias[hidden])
            done |= {id(p) for part in (*small.makes, small.reads) for p in part.parameters()}
    sources = dict(model.named_parameters())
    for name, parameter in student.named_parameters():
        if id(parameter) not in done:  # embeddings, norms and the head
            source = sources[name]
            for axis, size in enumerate(parameter.shape):
                if source.shape[axis] != size:
                    source = source.index_select(axis, hidden)
            parameter.copy_(source)


def largest(values: Tensor, num: int) -> Tensor:
    """Return the places of the largest values of each row [.., num], in their order."""
    return values.topk(num).indices.sort().values


def chosen(way: Way, small: Way) -> Tensor:
    """Return which numbers of all units of a layer stay."""
    squares_UW = way.squares()
    if small.num > way.num or small.width > way.width:
        raise RunError(
            f"student: has {small.num} units of {small.width} numbers in a layer, the teacher "
            f"{way.num} of {way.width}; take no more"
        )
    units = largest(squares_UW.sum(1), small.num)
    found_UW = torch.zeros_like(squares_UW, dtype=torch.bool)
    found_UW[units[:, None], largest(squares_UW[units], small.width)] = True
    return found_UW.flatten()
