"""Hold the rows of one forward and backward pass, with what a task knows about them.

Shapes: R or B rows, L row length, S documents, E examples of up to P tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pretrain.contracts.packing import Packing

IGNORE = -100  # label of a slot without a prediction: the default of torch's cross-entropy
# Label of tasks with a head [examples, longest]: the index of each example's tokens among the B * L
# positions, -1 after its last token.
PLACES = "places"

# The rows of a rank in a step, as a loader's worker sends them: `input_ids` [R, L] in the shards'
# narrow type, and the task's own tensors [R, ...].
Rows = dict[str, Tensor]


# (begin, length) of each document in the B * L positions, without padding [S, 2]. An array, because
# DDP and DeepSpeed look into every tuple that they pass on.
Documents = NDArray[np.int64]


class Batch(NamedTuple):
    """Hold a micro-batch; numbers are on the host, so that they need no sync."""

    input_ids: Tensor  # [B, L] packed rows, as the student reads them
    cu_seqlens: Tensor  # [S + 1] int32, starts of documents in the B * L positions, and the end
    max_length: int  # tokens of the longest document
    labels: Mapping[str, Tensor]  # [B, ...] or [E, ...] by the task's names
    counts: Mapping[str, int]  # what terms are means over, by name
    documents: Documents
    # Documents and padding; computed on the device, before a term reads it.
    packing: Packing = None  # type: ignore[assignment]

    def to(self, device: torch.device) -> Batch:
        """Copy from the host to a device without a sync; the ids are int64 there."""
        return self._replace(
            input_ids=send(self.input_ids, device).long(),
            cu_seqlens=send(self.cu_seqlens, device),
            labels={name: send(tensor, device) for name, tensor in self.labels.items()},
        )


def packed_batch(
    input_ids: Tensor,
    labels: Mapping[str, Tensor],
    counts: Mapping[str, int],
    *,
    cls_id: int,
    pad_id: int,
) -> Batch:
    """Build a micro-batch from rows on the host: find the documents, and count the tokens.

    A document begins at every [CLS], at every row, and where padding begins. Padding is a document
    of its own, so that every query has a key.

    Args:
        input_ids: [B, L].
        labels: of the task.
        counts: of the task; they replace those of the same names that are counted here: "tokens"
            (all but padding), "sequences" (documents) and "pairs" (of tokens of one document).
        cls_id, pad_id: ids of [CLS] and padding.
    """
    ids = input_ids.numpy()  # several times as fast as torch here, and complete for uint16
    # Documents are found on the host: the kernels' bounds then need no device sync.
    token = ids != pad_id
    starts = ids == cls_id
    starts[:, 1:] |= token[:, :-1] > token[:, 1:]
    starts[:, 0] = True
    begins = np.flatnonzero(starts)
    lengths = np.diff(begins, append=ids.size)
    max_length = int(lengths.max(initial=0))
    real = token.flat[begins]
    documents = np.stack([begins[real], lengths[real]], axis=1)
    lengths = lengths[real]
    found = {
        "tokens": int(np.count_nonzero(token)),
        "sequences": len(lengths),
        "pairs": int(np.square(lengths).sum()),
    }
    cu_seqlens = torch.from_numpy(np.append(begins, ids.size).astype(np.int32))
    return Batch(input_ids, cu_seqlens, max_length, labels, {**found, **counts}, documents)


def apart(hidden_BLD: Tensor, places_EP: Tensor) -> tuple[Tensor, Tensor]:
    """Return the examples of packed rows, padded with 0 [E, P, D], and where they are [E, P].

    Args:
        hidden_BLD: of packed rows.
        places_EP: as `PLACES`; of documents in general, too.
    """
    there_EP = places_EP >= 0
    hidden = hidden_BLD.flatten(0, 1).index_select(0, places_EP.clamp(min=0).flatten())
    return hidden.view(*places_EP.shape, -1).masked_fill(~there_EP[..., None], 0.0), there_EP


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the host's memory to a device, without a sync on a GPU."""
    # The GPU copies after the work that it already has, so the memory must be pinned until then:
    # torch sees to that, and reuses it for the next copies. A micro-batch is small (64 x 512: about
    # 100 kB), so pinning it here costs less than a thread for it.
    if device.type == "cuda" and tensor.is_cpu:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
