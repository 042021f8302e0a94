"""Our step in all the ways that are compared, and the usual one, around the same weights."""

from __future__ import annotations

import copy
import gc

import torch
from torch import nn

from pretrain.bench.baseline import UsualStep, padded, twin
from pretrain.bench.measure import DTYPES, OurStep
from pretrain.bench.sizes import Sizes
from pretrain.bench.subjects import PAD, batch, models
from pretrain.kernels.head import Backend
from pretrain.model.distillation import Distillation
from pretrain.model.encoder import MaskedLM, recompute_activations
from pretrain.objectives.terms import Term, cosine_term, kl_term, mlm_term

# Drawn weights have larger gradients than trained ones: less than a scaler begins with.
_LOSS_SCALES = {"fp32": 1.0, "bf16": 1.0, "fp16": 2.0**10}


def terms(kl: str) -> list[Term]:
    """DistilBERT's triple loss, KL over "all" tokens or "masked" ones."""
    over = kl_term(5.0, temperature=2.0, over="tokens" if kl == "all" else "masked")
    return [over, mlm_term(2.0), cosine_term(1.0)]


class Subjects:
    """Models on a device, and steps that are made of them.

    The usual step's teacher is in fp32, under autocast; ours in half precision, where the step is.
    """

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes, self.device = sizes, device
        student, teacher = models(sizes)
        self.student, self.teacher = _move(student, device), _move(teacher, device)
        self._half: dict[str, MaskedLM] = {}

    def ours(
        self,
        precision: str,
        kl: str,
        rows: int,
        *,
        head: Backend = "auto",
        compiled: bool = False,
        checkpointing: bool = False,
    ) -> OurStep:
        """Our step; `compiled` are the trunks, `checkpointing` is the student's."""
        student = self.student
        if checkpointing:
            student = twin(student)
            student.set_attn_implementation(self.student.config._attn_implementation)
            recompute_activations(student)
        teacher = self._teacher(precision)
        module = Distillation(
            student, teacher, terms(kl), pad_id=PAD, backend=head, compiled=compiled
        )
        moved = batch(self.sizes, rows).to(self.device)
        return OurStep(module, moved, DTYPES[precision], _LOSS_SCALES[precision])

    def usual(self, precision: str, kl: str, rows: int) -> UsualStep:
        """The usual step, on the same rows and masks."""
        moved = padded(batch(self.sizes, rows).to(self.device), pad_id=PAD)
        return UsualStep(
            twin(self.student),
            twin(self.teacher),
            moved,
            kl,
            DTYPES[precision],
            _LOSS_SCALES[precision],
        )

    def keep_teacher(self, precision: str) -> None:
        """Leave only one teacher on the device: the usual step's ("fp32") or one of ours."""
        self._half.clear()
        _move(self.teacher, self.device)
        if self._teacher(precision) is not self.teacher:
            _move(self.teacher, torch.device("cpu"))

    def _teacher(self, precision: str) -> MaskedLM:
        dtype = DTYPES[precision]
        if dtype is None:
            return self.teacher
        if precision not in self._half:
            self._half = {precision: _move(copy.deepcopy(self.teacher), dtype)}
        return self._half[precision]


def _move(model: MaskedLM, where: torch.device | torch.dtype) -> MaskedLM:
    nn.Module.to(model, where)
    return model


def free() -> None:
    """Give back what nobody holds, so that the next measurement begins with all memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
