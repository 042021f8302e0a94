"""A micro-batch as the model takes it, with all that only the host can know without asking.

Shapes: B rows, L row length, K mask slots a row, S segments.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pretrain.masking import IGNORE


class MicroBatch(NamedTuple):
    """Rows for one forward and backward pass; the counts spare the device from being asked."""

    input_ids: Tensor  # [B, L] corrupted packed rows
    positions: Tensor  # [B, K] mask slots
    labels: Tensor  # [B, K] their labels, -100 in an unused slot
    cu_seqlens: Tensor  # [S + 1] int32, where segments begin in the B * L positions, and the end
    num_tokens: int  # all but padding
    num_masked: int

    def to(self, device: torch.device) -> MicroBatch:
        """Copied to a device, without waiting where the memory is pinned."""
        return MicroBatch(
            *(t.to(device, non_blocking=True) if isinstance(t, Tensor) else t for t in self)  # type: ignore[arg-type]
        )


def micro_batch(
    input_ids: Tensor, positions: Tensor, labels: Tensor, *, cls_id: int, pad_id: int
) -> MicroBatch:
    """Count, and find the segments of, rows that lie in the host's memory.

    A segment begins at every [CLS], at every row, and where padding begins: padding is a segment of
    its own, so that no query is left without a key.
    """
    starts = input_ids == cls_id
    token = input_ids != pad_id
    starts[:, 1:] |= token[:, :-1] & ~token[:, 1:]
    starts[:, 0] = True
    begins = starts.flatten().nonzero()[:, 0]
    end = torch.tensor([input_ids.numel()])
    return MicroBatch(
        input_ids,
        positions,
        labels,
        torch.cat([begins, end]).int(),
        int(token.sum()),
        int((labels != IGNORE).sum()),
    )
