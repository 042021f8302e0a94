"""Copy tensors to host memory, so that they can be written while training changes them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:  # the import takes two seconds, and not all ranks need it
    from transformers import PreTrainedModel


class Snapshot:
    """Hold host copies of named tensors; the next `take` reuses their memory."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, tensors: Mapping[str, Tensor], *, tied: bool) -> dict[str, Tensor]:
        """Copy all tensors, and overwrite what the last call returned.

        If `tied`, several names of one tensor share a copy; else each name has its own.
        """
        owners: dict[object, str] = {}
        copies: dict[str, Tensor] = {}
        gpus: set[torch.device] = set()
        for name, tensor in tensors.items():
            # One tensor under two names: the same memory, read in the same way.
            where = (tensor.data_ptr(), tensor.device, tensor.shape, tensor.stride(), tensor.dtype)
            owner = owners.setdefault(where if tied else name, name)
            if owner != name:
                copies[name] = copies[owner]
                continue
            buffer = self._buffers.get(name)
            # Kept from save to save, because taking new memory is slow: 0.41 s for the first save
            # against 0.13 s (docs/log). Pinned memory lets a GPU copy without blocking the host.
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = torch.empty(
                    tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda
                )
                self._buffers[name] = buffer
            buffer.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
            if tensor.is_cuda:
                gpus.add(tensor.device)
            copies[name] = buffer
        # The copies are asynchronous. The next step overwrites the weights, so wait for them here.
        for gpu in gpus:
            torch.cuda.synchronize(gpu)
        return copies


def complete(weights: Mapping[str, Tensor], student: PreTrainedModel) -> dict[str, Tensor]:
    """Return `weights` under all names of the student's state dict, including tied ones.

    Raises:
        KeyError: a parameter is missing from `weights`, or one of them is not a parameter.
    """
    own = student.state_dict()
    by_place = {own[name].data_ptr(): tensor for name, tensor in weights.items()}
    parameters = {name for name, _ in student.named_parameters(remove_duplicate=False)}
    return {
        name: by_place[tensor.data_ptr()] if name in parameters else tensor
        for name, tensor in own.items()
    }


def without_weights(student: PreTrainedModel) -> PreTrainedModel:
    """Return the same model on no device: it can write weights, and has none of its own."""
    with torch.device("meta"):
        return type(student)(copy.deepcopy(student.config))
