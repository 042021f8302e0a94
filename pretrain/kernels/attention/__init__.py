"""Register attention for packed sequences with Transformers, under the name "packed".

It computes Transformers' `sdpa` with a block-diagonal mask: documents of a row do not attend to one
another. It runs in every layer of student and teacher. Given the bounds of the documents, a layer
calls the kernel of its device, without a mask of [rows, length, length]; without bounds it calls
`sdpa`, masks included.

Transformers' own functions cannot replace it: with packed `position_ids` and no mask, `sdpa` lets
documents attend to one another silently, and `eager` *adds* a boolean mask.

Shapes: B rows, H heads, L row length, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from pretrain.kernels.attention.dispatch import usable
from pretrain.kernels.attention.packing import Packing, block_diagonal_mask, find_documents

__all__ = ["IMPLEMENTATION", "Packing", "block_diagonal_mask", "find_documents"]

IMPLEMENTATION = "packed"
_SDPA, _SDPA_MASK = AttentionInterface()["sdpa"], AttentionMaskInterface()["sdpa"]


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend in a layer of Transformers: [B, H, L, D] to ([B, L, H, D], None)."""
    if cu_seqlens is None:
        return _SDPA(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if attention_mask is not None:
        raise ValueError("give cu_seqlens or attention_mask, not both: neither knows of the other")
    device = query.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        # As sdpa does: compute in the half precision of the autocast region.
        dtype = torch.get_autocast_dtype(device)
        query, key, value = (
            t if t.dtype == torch.float64 else t.to(dtype) for t in (query, key, value)
        )
    # Chosen at each call, because autocast decides the dtype.
    width = query.shape[-1]
    attend = usable(query.device, query.dtype, width)[0]
    return attend(query, key, value, cu_seqlens, dropout, scaling or width**-0.5), None


AttentionInterface.register(IMPLEMENTATION, _attention)
AttentionMaskInterface.register(IMPLEMENTATION, _SDPA_MASK)
