"""Where the documents of packed rows lie.

Shapes: B rows, L row length, S segments.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Packing(NamedTuple):
    """Where each position of packed rows belongs."""

    token_mask: Tensor  # [B, L] bool, False at padding
    position_ids: Tensor  # [B, L] position within the document
    cu_seqlens: Tensor  # [S + 1] int32, where each begins in the B * L positions, and the end


def find_documents(input_ids: Tensor, cu_seqlens: Tensor, *, pad_id: int) -> Packing:
    """Return the segments of packed rows [B, L] that begin at `cu_seqlens` [S + 1], the last being
    B * L.

    Padding at the end of a row is a segment of its own, so that no query is left without a key. The
    last bound may be repeated: segments of no length, which keep S the same from step to step.
    """
    index = torch.arange(input_ids.numel(), device=input_ids.device)
    begin = cu_seqlens.long()[_numbers(cu_seqlens, index)]
    return Packing(input_ids != pad_id, (index - begin).view_as(input_ids), cu_seqlens)


def block_diagonal_mask(cu_seqlens: Tensor, num_rows: int, row_length: int) -> Tensor:
    """[B, 1, L, L] bool, True where a query may look at a key: the kernels do without."""
    index = torch.arange(num_rows * row_length, device=cu_seqlens.device)
    number_BL = _numbers(cu_seqlens, index).view(num_rows, row_length)
    return (number_BL[:, :, None] == number_BL[:, None, :])[:, None]


def _numbers(cu_seqlens: Tensor, index: Tensor) -> Tensor:
    return torch.searchsorted(cu_seqlens.long(), index, right=True) - 1
