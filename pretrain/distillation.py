"""The module that is trained: student and frozen teacher on the same corrupted rows.

Shapes: B rows, L row length, K mask slots a row, M masked positions, D width, T terms.
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
        pad_id: int,
    ) -> None:
        super().__init__()
        self.student = student
        self._teacher = (teacher,)  # a tuple, so that nn.Module does not register it
        self.logit_terms = [term for term in terms if term.signal == "logits"]
        self.hidden_terms = [term for term in terms if term.signal == "last_hidden_state"]
        self.terms = self.logit_terms + self.hidden_terms
        self.pad_id = pad_id

    @property
    def teacher(self) -> MaskedLM | None:
        """The frozen teacher, where a term needs one."""
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
        packed = segments(input_ids, cu_seqlens, pad_id=self.pad_id)
        hidden = last_hidden_state(self.student, input_ids, packed)
        teacher_hidden = None
        if self.teacher is not None:
            with torch.inference_mode():
                teacher_hidden = last_hidden_state(self.teacher, input_ids, packed)

        loss = hidden.new_zeros((), dtype=torch.float32)
        sums = []
        num = len(self.logit_terms)
        if self.logit_terms:
            index, labels_M = _head_rows(packed.token_mask, positions, labels, num_masked)
            # KL over all tokens needs the head at every one; otherwise the slots are enough.
            everywhere = any(term.over == "tokens" for term in self.logit_terms)
            index = index[: num_tokens if everywhere else num_masked]
            head_loss, head_sums = vocabulary_losses(
                _project(self.student, hidden, index),
                self._teacher_projection(teacher_hidden, index),
                labels_M,
                self.logit_terms,
                coefficients_T[:num],
            )
            loss, sums = loss + head_loss, [*head_sums]
        for term, coefficient in zip(self.hidden_terms, coefficients_T[num:], strict=True):
            assert term.over == "tokens" and teacher_hidden is not None
            values = term.values(
                Signals(last_hidden_state=hidden),
                # Autograd keeps it, which it does with no tensor made in inference mode.
                Signals(last_hidden_state=teacher_hidden.clone()),
                labels,
            )
            total = (values * packed.token_mask).sum()
            loss, sums = loss + coefficient * total, [*sums, total.detach()]
        return loss, torch.stack(sums)

    def _teacher_projection(self, hidden_BLD: Tensor | None, index: Tensor) -> Projection | None:
        if hidden_BLD is None or not any(term.needs_teacher for term in self.logit_terms):
            return None
        assert self.teacher is not None
        with torch.inference_mode():
            return _project(self.teacher, hidden_BLD, index)


def _project(model: MaskedLM, hidden_BLD: Tensor, index: Tensor) -> Projection:
    return projection(model, hidden_BLD.flatten(0, 1).index_select(0, index))


def _head_rows(
    token_mask: Tensor, positions: Tensor, labels: Tensor, num_masked: int
) -> tuple[Tensor, Tensor]:
    """(all B*L positions, masked ones first and padding last [B*L]; labels of the first [M])."""
    spread = torch.full(token_mask.shape, IGNORE, device=labels.device, dtype=labels.dtype)
    spread = spread.scatter(1, positions, labels).flatten()
    rank = torch.where(spread != IGNORE, 0, torch.where(token_mask.flatten(), 1, 2))
    index = rank.argsort(stable=True)
    return index, spread[index[:num_masked]]
