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


def segments(input_ids: Tensor, *, cls_id: int, pad_id: int) -> Segments:
    """Read the documents of packed rows [B, L] off their ids: one begins at every [CLS].

    Padding at the end of a row forms a segment of its own, so that no query is left without a key.
    """
    length = input_ids.shape[1]
    token_mask = input_ids != pad_id
    starts = input_ids == cls_id
    starts[:, 1:] |= token_mask[:, :-1] & ~token_mask[:, 1:]
    index = torch.arange(length, device=input_ids.device)
    begin = torch.where(starts, index, 0).cummax(dim=1).values
    attention_mask = (begin[:, :, None] == begin[:, None, :])[:, None]
    return Segments(token_mask, index - begin, attention_mask)
