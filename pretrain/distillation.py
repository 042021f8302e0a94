"""The module that is trained: student and frozen teacher on the same corrupted rows.

Shapes: B rows, L row length, K mask slots a row, N positions, D width, T terms.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pretrain.attention import segments
from pretrain.head import Projection, vocabulary_losses
from pretrain.masking import IGNORE
from pretrain.models import MaskedLM, last_hidden_state, projection
from pretrain.objectives import Signals, Term


class Distillation(nn.Module):
    """Forward gives the unnormalised loss of a micro-batch and the sum of each term.

    The teacher is no submodule: it is neither wrapped, nor moved, nor saved with the student.
    """

    def __init__(
        self,
        student: MaskedLM,
        teacher: MaskedLM | None,
        terms: Sequence[Term],
        *,
        cls_id: int,
        pad_id: int,
    ) -> None:
        super().__init__()
        self.student = student
        self._teacher = (teacher,)  # a tuple, so that nn.Module does not register it
        self.logit_terms = [term for term in terms if term.signal == "logits"]
        self.hidden_terms = [term for term in terms if term.signal == "last_hidden_state"]
        self.terms = self.logit_terms + self.hidden_terms
        self.cls_id, self.pad_id = cls_id, pad_id

    @property
    def teacher(self) -> MaskedLM | None:
        """The frozen teacher, where a term needs one."""
        return self._teacher[0]

    def forward(
        self, input_ids: Tensor, positions: Tensor, labels: Tensor, coefficients_T: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(sum over terms of coefficient * sum [], sums [T] in the order of `self.terms`).

        Args:
            input_ids: [B, L] corrupted packed rows.
            positions: [B, K] mask slots.
            labels: [B, K] their labels, -100 in an unused slot.
            coefficients_T: the factor of each term's sum; the caller divides by a count.
        """
        packed = segments(input_ids, cls_id=self.cls_id, pad_id=self.pad_id)
        hidden = last_hidden_state(self.student, input_ids, packed)
        teacher_hidden = None
        if self.teacher is not None:
            with torch.no_grad():
                teacher_hidden = last_hidden_state(self.teacher, input_ids, packed)

        # KL over all tokens needs the head everywhere; otherwise the slots are enough.
        everywhere = any(term.over == "tokens" for term in self.logit_terms)
        place = _everywhere if everywhere else _at_slots
        labels_N, token_mask_N = place(packed.token_mask, positions, labels)
        loss = hidden.new_zeros((), dtype=torch.float32)
        sums = []
        if self.logit_terms:
            num = len(self.logit_terms)
            masks = {"tokens": token_mask_N, "masked": labels_N != IGNORE}
            head_loss, head_sums = vocabulary_losses(
                self._project(self.student, hidden, positions, everywhere),
                self._teacher_projection(teacher_hidden, positions, everywhere),
                labels_N,
                self.logit_terms,
                torch.stack([masks[term.over] for term in self.logit_terms]),
                coefficients_T[:num],
            )
            loss, sums = loss + head_loss, [*head_sums]
        for term, coefficient in zip(
            self.hidden_terms, coefficients_T[len(self.logit_terms) :], strict=True
        ):
            assert term.over == "tokens"
            values = term.values(
                Signals(last_hidden_state=hidden), Signals(last_hidden_state=teacher_hidden), labels
            )
            total = (values * packed.token_mask).sum()
            loss, sums = loss + coefficient * total, [*sums, total.detach()]
        return loss, torch.stack(sums)

    def _teacher_projection(
        self, hidden: Tensor | None, positions: Tensor, everywhere: bool
    ) -> Projection | None:
        if hidden is None or not any(term.needs_teacher for term in self.logit_terms):
            return None
        assert self.teacher is not None
        with torch.no_grad():
            return self._project(self.teacher, hidden, positions, everywhere)

    def _project(
        self, model: MaskedLM, hidden_BLD: Tensor, positions: Tensor, everywhere: bool
    ) -> Projection:
        if not everywhere:
            index = positions[:, :, None].expand(-1, -1, hidden_BLD.shape[-1])
            hidden_BLD = hidden_BLD.gather(1, index)
        return projection(model, hidden_BLD.flatten(0, 1))


def _everywhere(token_mask: Tensor, positions: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(labels [B*L], token mask [B*L])."""
    spread = torch.full(token_mask.shape, IGNORE, device=labels.device, dtype=labels.dtype)
    return spread.scatter(1, positions, labels).flatten(), token_mask.flatten()


def _at_slots(token_mask: Tensor, positions: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(labels [B*K], token mask [B*K])."""
    return labels.flatten(), token_mask.gather(1, positions).flatten()
