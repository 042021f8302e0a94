"""Run student and frozen teacher on a micro-batch of packed, masked rows, and compute the terms.

Shapes: B rows, L row length, K mask slots a row, M masked positions, S documents, D width, T terms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pretrain.data.masking import IGNORE
from pretrain.kernels.attention import Packing, find_documents
from pretrain.kernels.compilation import compile_static
from pretrain.kernels.cpu_layers import use_cpu_layers
from pretrain.kernels.head import Backend, vocabulary_losses
from pretrain.model.encoder import MaskedLM, keep_embeddings_eager, last_hidden_state, projection
from pretrain.objectives.terms import Encoded, SignalTerm, Term, VocabularyTerm


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


class Distillation(nn.Module):
    """Forward gives the unnormalised loss of a micro-batch and the sum of each term.

    The teacher is no submodule: it is neither wrapped, nor moved, nor saved with the student.

    Args:
        backend: of the vocabulary head, see `vocabulary_losses`.
        compiled: compile both trunks, at the first call and anew for other shapes of batches.
    """

    def __init__(
        self,
        student: MaskedLM,
        teacher: MaskedLM | None,
        terms: Sequence[Term],
        *,
        pad_id: int,
        backend: Backend = "auto",
        compiled: bool = False,
    ) -> None:
        super().__init__()
        self.student = student
        needed = any(term.needs_teacher for term in terms)
        # A tuple, so that nn.Module does not register it.
        self._teacher = (teacher if needed else None,)
        self.vocabulary_terms = [term for term in terms if isinstance(term, VocabularyTerm)]
        self.signal_terms = [term for term in terms if isinstance(term, SignalTerm)]
        self.terms: list[Term] = [*self.vocabulary_terms, *self.signal_terms]
        self.pad_id = pad_id
        self.backend, self.compiled = backend, compiled
        for model in (student, self.teacher):
            if model is not None:
                use_cpu_layers(model)
        self._trunk = last_hidden_state
        if compiled:
            self._trunk = compile_static(last_hidden_state, whole=False)
            keep_embeddings_eager(student)

    @property
    def teacher(self) -> MaskedLM | None:
        """Return the frozen teacher, where a term needs one."""
        return self._teacher[0]

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        labels: Tensor,
        cu_seqlens: Tensor,
        num_tokens: int,
        num_masked: int,
        coefficients_T: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """(sum over terms of coefficient * sum [], sums [T] in the order of `self.terms`).

        Args:
            input_ids .. num_masked: a `MicroBatch`.
            coefficients_T: the factor of each term's sum; the caller divides by a count.
        """
        packing, hidden, teacher_hidden = self.trunks(input_ids, cu_seqlens)
        loss = hidden.new_zeros((), dtype=torch.float32)
        sums = []
        num = len(self.vocabulary_terms)
        if self.vocabulary_terms:
            # All positions in one order: masked first, then the other tokens, padding last.
            labels_BL = torch.full_like(input_ids, IGNORE).scatter(1, positions, labels)
            unmasked_BL = torch.where(packing.token_mask, 1, 2)
            order = torch.where(labels_BL != IGNORE, 0, unmasked_BL).flatten().argsort(stable=True)
            # KL over all tokens needs the head at every one; otherwise the masked are enough.
            everywhere = any(term.over == "tokens" for term in self.vocabulary_terms)
            index = order[: num_tokens if everywhere else num_masked]
            teacher_projection = None
            if any(term.needs_teacher for term in self.vocabulary_terms):
                assert self.teacher is not None and teacher_hidden is not None
                with _inference(self.teacher):
                    teacher_projection = projection(
                        self.teacher, teacher_hidden.flatten(0, 1).index_select(0, index)
                    )
            head_loss, head_sums = vocabulary_losses(
                projection(self.student, hidden.flatten(0, 1).index_select(0, index)),
                teacher_projection,
                labels_BL.flatten()[order[:num_masked]],
                self.vocabulary_terms,
                coefficients_T[:num],
                backend=self.backend,
            )
            loss, sums = loss + head_loss, [*head_sums]
        for term, coefficient in zip(self.signal_terms, coefficients_T[num:], strict=True):
            # A clone, because autograd cannot save a tensor made in inference mode.
            teacher = None if teacher_hidden is None else Encoded(teacher_hidden.clone())
            total = term.total(Encoded(hidden), teacher, packing.token_mask)
            loss, sums = loss + coefficient * total, [*sums, total.detach()]
        return loss, torch.stack(sums)

    def trunks(
        self, input_ids: Tensor, cu_seqlens: Tensor
    ) -> tuple[Packing, Tensor, Tensor | None]:
        """(packing, last hidden states of the student and of the teacher [B, L, D])."""
        if self.compiled:  # shapes are the same from step to step but for the number of segments
            torch._dynamo.mark_dynamic(cu_seqlens, 0)
        packing = find_documents(input_ids, cu_seqlens, pad_id=self.pad_id)
        hidden = self._trunk(self.student, input_ids, packing)
        if self.teacher is None:
            return packing, hidden, None
        with _inference(self.teacher):
            return packing, hidden, self._trunk(self.teacher, input_ids, packing)


@contextmanager
def _inference(teacher: MaskedLM) -> Iterator[None]:
    """Inference mode; without autocast where the weights are in half precision themselves."""
    device = teacher.device.type
    autocast = torch.is_autocast_enabled(device) and teacher.dtype == torch.float32
    dtype = torch.get_autocast_dtype(device)
    with torch.inference_mode(), torch.autocast(device, dtype, enabled=autocast):
        yield
