"""Run student and frozen teacher on a micro-batch of packed, masked rows, and compute the terms.

Shapes: B rows, L row length, K mask slots per row, M masked positions, N positions of the LM head,
D width, T terms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pretrain.contracts.batch import IGNORE, PLACES, Batch, apart
from pretrain.contracts.packing import Packing, find_documents
from pretrain.contracts.terms import (
    Encoded,
    Signal,
    SignalTerm,
    TeacherLabels,
    Term,
    VocabularyTerm,
)
from pretrain.kernels.cpu_layers import use_cpu_layers
from pretrain.kernels.head import Backend, Projection, vocabulary_losses
from pretrain.model.families import MaskedLM, encode, family_of

HEAD = "task_head"  # the task's head, among the modules trained with the student
TYPES = "types"  # the tokens' types [B, L], among the labels of a batch


class Distillation(nn.Module):
    """Compute the unnormalised loss of a micro-batch, and the sum of each term.

    The teacher is not a submodule: it is not wrapped, moved or saved with the student.

    Args:
        pad_id: the id of padding.
        num_tokens: of the tokenizer; more embeddings than these are padding. None: there are none.
        adapters: the objective's modules that are trained with the student.
        teacher_labels: makes labels of the teacher's output on a batch, for instance its vectors.
        backend: of the LM head, see `vocabulary_losses`.
        recompute: keep only each layer's input of the student; see `families.encode`.
        predecessor: a teacher whose layers stand in for the student's; see `families.walk`. Then
            only the student's layers are trained.
    """

    def __init__(
        self,
        student: MaskedLM,
        teacher: MaskedLM | None,
        terms: Sequence[Term],
        *,
        pad_id: int,
        num_tokens: int | None = None,
        adapters: nn.ModuleDict | None = None,
        teacher_labels: TeacherLabels | None = None,
        backend: Backend = "auto",
        recompute: bool = False,
        predecessor: MaskedLM | None = None,
    ) -> None:
        super().__init__()
        self.student, self.adapters = student, adapters or nn.ModuleDict()
        needed = any(term.needs_teacher for term in terms)
        # In a tuple nn.Module does not register it as a submodule.
        self._teacher = (teacher if needed else None,)
        self._predecessor = (predecessor,)
        self._teacher_labels = teacher_labels
        self.vocabulary_terms = [term for term in terms if isinstance(term, VocabularyTerm)]
        self.signal_terms = [term for term in terms if isinstance(term, SignalTerm)]
        self.terms: list[Term] = [*self.vocabulary_terms, *self.signal_terms]
        # What the encoders return besides their last hidden state.
        self._student_needs = frozenset[Signal]().union(*(t.student for t in self.signal_terms))
        self._teacher_needs = frozenset[Signal]().union(*(t.teacher for t in self.signal_terms))
        self.pad_id, self.num_tokens = pad_id, num_tokens
        self.backend, self.recompute = backend, recompute
        for model in (student, self.teacher, predecessor):
            if model is not None:
                use_cpu_layers(model)
        if predecessor is not None:
            self.requires_grad_(False)
            self._layers().requires_grad_(True)

    @property
    def teacher(self) -> MaskedLM | None:
        """Return the frozen teacher; None if no term needs one."""
        return self._teacher[0]

    def forward(
        self, batch: Batch, factors_T: Tensor, running: Sequence[bool] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (sum over terms of factor * sum [], sums [T] in the order of `self.terms`).

        Args:
            batch: on the device; DDP and DeepSpeed pass it on.
            factors_T: the factor of each term's sum; the caller divides by a count.
            running: which of the student's layers run, if there is a predecessor.
        """
        packing, student, teacher = self.encode(batch, running)
        batch = batch._replace(packing=packing)
        input_ids, labels, counts = batch.input_ids, batch.labels, batch.counts
        loss = student.last_hidden_state.new_zeros((), dtype=torch.float32)
        for layer, runs in zip(self._layers(), running or (), strict=False):
            if not runs:  # DDP waits for a gradient of each parameter, and a resumed run has one
                loss = loss + 0.0 * sum(parameter.sum() for parameter in layer.parameters())
        sums = []

        # Terms on logits: the LM head computes them for N positions, the M masked ones first.
        num = len(self.vocabulary_terms)
        if self.vocabulary_terms:
            # Order all positions: masked, then the other tokens, then padding.
            positions_BK, labels_BK = labels["positions"].long(), labels["masked"].long()
            labels_BL = torch.full_like(input_ids, IGNORE).scatter(1, positions_BK, labels_BK)
            unmasked_BL = torch.where(packing.token_mask, 1, 2)
            order = torch.where(labels_BL != IGNORE, 0, unmasked_BL).flatten().argsort(stable=True)
            # KL over all tokens needs the head at every token, other terms at masked ones only. The
            # counts come from the host: a boolean index would be a device sync.
            everywhere = any(term.over == "tokens" for term in self.vocabulary_terms)
            index_N = order[: counts["tokens" if everywhere else "masked"]]

            def projection(model: MaskedLM, encoded: Encoded) -> Projection:
                hidden_ND = encoded.last_hidden_state.flatten(0, 1).index_select(0, index_N)
                return family_of(model).projection(model, hidden_ND).first(self.num_tokens)

            student_projection = projection(self.student, student)
            teacher_projection = None
            if any(term.needs_teacher for term in self.vocabulary_terms):
                assert self.teacher is not None and teacher is not None
                with _inference(self.teacher):
                    teacher_projection = projection(self.teacher, teacher)
            head_loss, head_sums = vocabulary_losses(
                student_projection,
                teacher_projection,
                labels_BL.flatten()[order[: counts["masked"]]],
                self.vocabulary_terms,
                factors_T[:num],
                backend=self.backend,
            )
            loss, sums = loss + head_loss, [*head_sums]

        # Terms on hidden states and signals.
        if self.signal_terms and teacher is not None:
            # Autograd cannot save a tensor of inference mode, but a clone of it.
            signals = {name: signal.clone() for name, signal in teacher.signals.items()}
            teacher = Encoded(teacher.last_hidden_state.clone(), signals)
            if self._teacher_labels is not None:
                batch = batch._replace(labels={**labels, **self._teacher_labels(teacher, batch)})
        if HEAD in self.adapters:
            # Once for all terms: its dropout is drawn once.
            logits = self.adapters[HEAD](*apart(student.last_hidden_state, labels[PLACES]))
            student = student._replace(task_logits=logits)
        for term, factor in zip(self.signal_terms, factors_T[num:], strict=True):
            total = term.total(student, teacher, batch, self.adapters)
            loss, sums = loss + factor * total, [*sums, total.detach()]
        return loss, torch.stack(sums)

    def _layers(self) -> nn.ModuleList:
        return family_of(self.student).layers(self.student)

    def encode(
        self, batch: Batch, running: Sequence[bool] | None = None
    ) -> tuple[Packing, Encoded, Encoded | None]:
        """Return (packing, the student's output, the teacher's output or None)."""
        input_ids, cu_seqlens, max_length = batch[:3]
        types = batch.labels.get(TYPES)
        packing = find_documents(input_ids, cu_seqlens, max_length, pad_id=self.pad_id)
        student = encode(
            self.student,
            input_ids,
            packing,
            self._student_needs,
            types=types,
            recompute=self.recompute,
            other=self._predecessor[0],
            running=running,
        )
        # An objective without a teacher, for instance MLM, costs no second forward pass.
        if self.teacher is None:
            return packing, student, None
        with _inference(self.teacher):
            teacher = encode(self.teacher, input_ids, packing, self._teacher_needs, types=types)
        return packing, student, teacher


def parameters_by_name(student: nn.Module, adapters: nn.ModuleDict) -> dict[str, nn.Parameter]:
    """Return all that a run may train: by the student's own names, and `adapters.NAME`."""
    others = adapters.named_parameters(prefix="adapters")
    return {**dict(student.named_parameters()), **dict(others)}


@contextmanager
def _inference(teacher: MaskedLM) -> Iterator[None]:
    """Enter inference mode, without autocast if the weights themselves are in half precision."""
    # A half-precision teacher needs no casts, so autocast is left out.
    device = teacher.device.type
    autocast = torch.is_autocast_enabled(device) and teacher.dtype == torch.float32
    dtype = torch.get_autocast_dtype(device)
    with torch.inference_mode(), torch.autocast(device, dtype, enabled=autocast):
        yield
