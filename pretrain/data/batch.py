"""A micro-batch as the model takes it, with all that only the host can know without asking.

Shapes: B rows, L row length, K mask slots a row, S segments.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pretrain.data.masking import IGNORE


class MicroBatch(NamedTuple):
    """Rows for one forward and backward pass; the counts spare the device from being asked."""

    input_ids: Tensor  # [B, L] corrupted packed rows
    positions: Tensor  # [B, K] mask slots
    labels: Tensor  # [B, K] their labels, -100 in an unused slot
    cu_seqlens: Tensor  # [S + 1] int32, where segments begin in the B * L positions, then the end
    num_tokens: int  # all but padding
    num_masked: int

    def to(self, device: torch.device) -> MicroBatch:
        """Copied from the host to a device without waiting, and there made int64 for the model.

        Until then ids, positions and labels have any integer type: a loader's are narrow.
        """
        ids, positions, labels, cu_seqlens = (send(tensor, device) for tensor in self[:4])
        return MicroBatch(
            ids.long(),
            positions.long(),
            labels.long(),
            cu_seqlens,
            self.num_tokens,
            self.num_masked,
        )


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the host's memory to a device; on a GPU the host does not wait.

    The copy takes its turn behind the work that the GPU was given before, so it must read memory
    that is pinned: torch keeps that until then, and the next copies use it again. A micro-batch is
    small (64 x 512: about 100 kB), so pinning it here costs less than a thread that does.
    """
    if device.type == "cuda" and tensor.is_cpu:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def micro_batch(
    input_ids: Tensor, positions: Tensor, labels: Tensor, *, cls_id: int, pad_id: int
) -> MicroBatch:
    """Count, and find the segments of, rows of any integer type that lie in the host's memory.

    A segment begins at every [CLS], at every row, and where padding begins: padding is a segment of
    its own, so that no query is left without a key.
    """
    ids = input_ids.numpy()  # several times as fast as torch here, and at home in uint16
    token = ids != pad_id
    starts = ids == cls_id
    starts[:, 1:] |= token[:, :-1] > token[:, 1:]
    starts[:, 0] = True
    begins = np.flatnonzero(starts)
    # The end is repeated up to a power of two of segments: on a GPU, new shapes are planned anew.
    cu_seqlens = np.full((1 << (len(begins) - 1).bit_length()) + 1, ids.size, dtype=np.int32)
    cu_seqlens[: len(begins)] = begins
    return MicroBatch(
        input_ids,
        positions,
        labels,
        torch.from_numpy(cu_seqlens),
        int(np.count_nonzero(token)),
        int(np.count_nonzero(labels.numpy() != IGNORE)),
    )
