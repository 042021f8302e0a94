"""Draw the inputs of an LM head."""

import torch
from torch import Tensor

from pretrain.kernels.head import Projection


def draw(seed: int, *shape: int) -> Tensor:
    """Return normal numbers in fp64, on the CPU."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def projections(
    positions: int,
    width: int,
    vocabulary: int,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> tuple[Projection, Projection]:
    """Return a student that requires gradients, and a teacher."""
    shapes = (positions, width), (vocabulary, width), (vocabulary,)
    tensors = [draw(seed, *shape).to(device, dtype) for seed, shape in enumerate(2 * shapes)]
    student = [tensor.requires_grad_() for tensor in tensors[:3]]
    return Projection(*student), Projection(*tensors[3:])
