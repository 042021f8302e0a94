"""Compare the attention kernels of a GPU with the formula."""

from typing import Any

import pytest
import torch
from support.attention import (
    SCALE,
    attended,
    compare,
    inputs,
    packing,
    relative,
    with_gradients,
)

from pretrain.kernels.attention import attend as attend_packed
from pretrain.kernels.attention.dispatch import flash, masked, memory_efficient, usable


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("width", [8, 64, 192])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("attend", [flash, memory_efficient, masked])
def test_the_kernels_of_a_gpu(
    attend: Any, dtype: torch.dtype, width: int, window: int | None
) -> None:
    """Compare with the formula; with dropout, check that backward drops what forward dropped.

    For a given draw the output is linear in the values, so <d values, values> = <d out, out>.
    """
    device = torch.device("cuda", 0)
    if attend not in usable(device, dtype, width, window):
        pytest.skip(f"{attend.__name__} has no kernel of {dtype} and window {window} for this GPU")
    drawn = inputs(width=width, dtype=dtype)
    drawn[0] = (drawn[0] * (8 / width) ** 0.5).detach()  # else wide heads have one-hot softmaxes
    tensors = [t.detach().to("cuda").requires_grad_() for t in drawn]
    found = attended(tensors, attend=attend, window=window)
    compare(found, tensors, 1e-5 if dtype == torch.float32 else 2e-2, window=window)
    if attend not in usable(device, dtype, width, window, 0.5):
        return
    output, _, _, grad_value = attended(tensors, 0.5, attend, window)
    one = (grad_value.double() * tensors[2].double()).sum()
    other = (tensors[3].double() * output.double()).sum()
    size = (tensors[3].double() * output.double()).abs().sum()
    assert abs(one - other) < 1e-2 * size
    assert relative(output.cpu(), found[0].cpu().double()) > 0.1  # something was dropped


@pytest.mark.gpu
@pytest.mark.parametrize("width", [3, 26, 192])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_heads_of_any_width(dtype: torch.dtype, width: int) -> None:
    """Compare with the formula: a kernel takes multiples of 8, and the others are padded."""
    drawn = inputs(width=width, dtype=dtype)
    drawn[0] = (drawn[0] * (8 / width) ** 0.5).detach()  # else wide heads have one-hot softmaxes
    tensors = [t.detach().to("cuda").requires_grad_() for t in drawn]
    # The formula's scale, which is not that of this width.
    query = tensors[0] * (SCALE * width**0.5)
    flat = (t.transpose(1, 2).flatten(2) for t in (query, *tensors[1:3]))
    output = attend_packed(*flat, packing("cuda"), 3, 0.0).unflatten(2, (3, width))
    found = with_gradients(output, tensors)
    compare(found, tensors, 1e-5 if dtype == torch.float32 else 2e-2)
