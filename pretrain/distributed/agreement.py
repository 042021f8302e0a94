"""Compare the weights of all ranks, which are the same unless memory or a network has failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pretrain import DivergedError
from pretrain.data.hashing import mix, root
from pretrain.run import Run

_HASH = 4  # names this use of `root`
_CHUNK = 1 << 17  # elements hashed at a time: their int64 copies stay in a core's cache
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by element size


def compare_weights(run: Run) -> None:
    """Compare the weights of all ranks, because memory and networks fail.

    Raises:
        DivergedError: on every rank, naming those that differ.
    """
    accelerator = run.accelerator
    if accelerator.num_processes == 1 or run.config.train.compare_every == 0:
        return
    mine = parameter_checksum(run.module.parameters()).reshape(1)
    # Reading the gathered values is a device sync, so steps in between do without it.
    odd = differing(accelerator.gather(mine).tolist())
    if odd:
        ranks = " and ".join(f"rank {rank}" for rank in odd)
        raise DivergedError(
            f"step {run.state.step}: the weights of {ranks} differ from the other ranks': "
            "look for failing memory or network there. No checkpoint was written since the weights "
            "were last the same; the same command continues from there"
        )


@torch.no_grad()
def parameter_checksum(parameters: Iterable[Tensor]) -> Tensor:
    """Return a 64-bit hash [] (int64) of all bits of the parameters and of their order.

    It is the sum, modulo 2**64, of each element's bits as an integer times an odd weight of its
    own. So one flipped bit always changes it, and the order of summation never does. It stays on
    the device of the parameters, which is one for all, and nothing is read back. It takes a few
    chunks of extra memory, and a copy of a parameter that is not contiguous. Without parameters it
    is 0.
    """
    # Weights of the positions in a chunk. They are odd, so multiplying by them loses no bit modulo
    # 2^64.
    total = weights = torch.zeros((), dtype=torch.int64)
    chunks = 0
    for parameter in parameters:
        bits = parameter.detach().reshape(-1).view(_INTEGERS[parameter.element_size()])
        if chunks == 0:
            total = total.to(bits.device)
            weights = 2 * mix(torch.arange(_CHUNK, device=bits.device)) + 1
        # The factor of the chunk makes the same values at another place another sum.
        for chunk in bits.split(_CHUNK):
            chunks += 1
            of_chunk = 2 * root(0, _HASH, chunks) + 1
            total = total + (chunk * weights[: len(chunk)]).sum() * of_chunk
    return total


def differing(checksums: Sequence[int]) -> list[int]:
    """Return the ranks whose checksum is not the most frequent one; all ranks if two are."""
    # With two ranks, or half and half, nothing shows which is right.
    ranked = Counter(checksums).most_common(2)
    if len(ranked) == 2 and ranked[0][1] == ranked[1][1]:
        return list(range(len(checksums)))
    return [rank for rank, value in enumerate(checksums) if value != ranked[0][0]]
