"""Packed rows: documents that share a row neither attend to one another nor shift positions.

Both models take a 4-D boolean mask through Transformers' `sdpa` attention. Packed `position_ids`
without a mask would let documents attend to one another silently, and `eager` attention would *add*
a boolean mask, so models are always loaded with `attn_implementation="sdpa"`.

Shapes: B rows, L row length.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

IMPLEMENTATION = "sdpa"


class Segments(NamedTuple):
    """Where each position of packed rows belongs."""

    token_mask: Tensor  # [B, L] bool, False at padding
    position_ids: Tensor  # [B, L] position within the document
    attention_mask: Tensor  # [B, 1, L, L] bool, True where a query may look at a key
    cu_seqlens: Tensor  # [S + 1] int32, where each begins in the B * L positions, and the end


def segments(input_ids: Tensor, cu_seqlens: Tensor, *, pad_id: int) -> Segments:
    """The segments of packed rows [B, L] that begin at `cu_seqlens` [S + 1], the last being B * L.

    Padding at the end of a row is a segment of its own, so that no query is left without a key.
    """
    B, L = input_ids.shape
    index = torch.arange(B * L, device=input_ids.device)
    number = torch.searchsorted(cu_seqlens.long(), index, right=True) - 1
    begin = cu_seqlens.long()[number]
    number = number.view(B, L)
    attention_mask = (number[:, :, None] == number[:, None, :])[:, None]
    return Segments(input_ids != pad_id, (index - begin).view(B, L), attention_mask, cu_seqlens)
