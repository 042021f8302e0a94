"""Attend within the documents of packed rows.

It computes torch's `scaled_dot_product_attention` with a block-diagonal mask: documents of a row do
not attend to one another. The walk over the layers (`pretrain/model/families`) calls it in student
and teacher. Given the bounds of the documents it calls the kernel of the device, without a mask of
[rows, length, length].

Shapes: B rows, L row length, H heads, D head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.contracts.packing import Packing
from pretrain.kernels.attention.dispatch import MULTIPLE, flash, memory_efficient, usable


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    num_heads: int,
    dropout: float,
    window: int | None = None,
) -> Tensor:
    """Attend with all heads; query, key, value and the result are [B, L, H * D].

    With a `window` a query attends to keys at a distance of at most so many tokens.
    """
    device, split = query.device, (*query.shape[:2], num_heads, -1)
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        # As sdpa does: compute in the half precision of the autocast region.
        dtype = torch.get_autocast_dtype(device.type)
        query, key, value = (
            t if t.dtype == torch.float64 else t.to(dtype) for t in (query, key, value)
        )
    query, key, value = (t.view(split) for t in (query, key, value))
    width = query.shape[-1]
    # Chosen at each call, because autocast decides the dtype.
    kernel = usable(device, query.dtype, width, window, dropout)[0]
    if (missing := -width % MULTIPLE) and kernel in (flash, memory_efficient):
        # Numbers of 0 change no product of query and key, and give outputs of 0.
        query, key, value = (F.pad(t, (0, missing)) for t in (query, key, value))
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    documents = packing.cu_seqlens, packing.max_length
    output = kernel(q, k, v, *documents, dropout, width**-0.5, window)
    return output[..., :width].flatten(2)
