"""Compute positions, token mask and attention mask of packed rows from the documents' starts.

BERT and DistilBERT take `position_ids` from here in every pass. The attention mask is for tests and
for the kernel `masked`.

Shapes: B rows, L row length, S documents.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Packing(NamedTuple):
    """Hold the document structure of packed rows."""

    token_mask: Tensor  # [B, L] bool, False at padding
    position_ids: Tensor  # [B, L] position within the document
    cu_seqlens: Tensor  # [S + 1] int32, starts of documents in the B * L positions, and the end
    max_length: int  # a bound of the documents' lengths; kernels take memory for S of that length


def find_documents(
    input_ids: Tensor, cu_seqlens: Tensor, max_length: int, *, pad_id: int
) -> Packing:
    """Compute the packing of rows [B, L] whose documents start at `cu_seqlens` [S + 1].

    The last entry is B * L. It may be repeated: empty documents keep S the same from step to step.
    Padding at the end of a row is a document of its own, so that every query has a key.
    """
    index = torch.arange(input_ids.numel(), device=input_ids.device)
    begin = cu_seqlens.long()[document_numbers(cu_seqlens, index)]
    position_ids = (index - begin).view_as(input_ids)
    return Packing(input_ids != pad_id, position_ids, cu_seqlens, max_length)


def block_diagonal_mask(cu_seqlens: Tensor, num_rows: int, row_length: int) -> Tensor:
    """Return [B, 1, L, L] bool, True where a query may attend to a key."""
    index = torch.arange(num_rows * row_length, device=cu_seqlens.device)
    number_BL = document_numbers(cu_seqlens, index).view(num_rows, row_length)
    return (number_BL[:, :, None] == number_BL[:, None, :])[:, None]


def document_numbers(cu_seqlens: Tensor, index: Tensor) -> Tensor:
    """Return the number of each position's document."""
    # `right` skips the empty documents at the end and puts a start into its own document.
    return torch.searchsorted(cu_seqlens.long(), index, right=True) - 1
