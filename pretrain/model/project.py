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
from pretrain.model.cut import Cuts, Way, cut_into, ways


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
    cuts: Cuts = {}
    for layer, own in both:
        for way, small in zip(layer, own, strict=True):
            if small.width != way.width and hasattr(model.config, "rope_parameters"):
                raise RunError(
                    f"student: its heads have {small.width} numbers, the teacher's {way.width}, "
                    "which are turned by positions; change num_attention_heads or hidden_size"
                )
            cuts |= way.cuts(chosen(way, small), hidden)
    shapes = {name: parameter.shape for name, parameter in student.named_parameters()}
    for name, source in model.named_parameters():
        if id(source) not in cuts and name in shapes:  # embeddings, norms and the head
            same = map(int.__eq__, source.shape, shapes[name])
            cuts[id(source)] = tuple(None if s else hidden for s in same)
    cut_into(model, student, cuts)


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
