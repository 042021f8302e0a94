"""Compute the baseline: the distillation step as its formulas read, on whole tensors.

This is DistilBERT's triple loss (arXiv 1910.01108, section 3) as it is commonly written. Both
models are called as in Transformers, with padded sequences, a 2-D attention mask and `sdpa`
attention. The logits of both exist in full at every position, `masked_select` copies the positions
that count, and `.item()` reads each term back.

Shapes: B sequences, L length, V vocabulary, D width, N selected positions.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pretrain.data.masking import IGNORE
from pretrain.device.precision import PRECISIONS, Precision
from pretrain.kernels.cpu_layers import use_torch_layers
from pretrain.model.distillation import MicroBatch
from pretrain.model.families import MaskedLM

Model = TypeVar("Model", bound=MaskedLM)

WEIGHTS = {"kl": 5.0, "mlm": 2.0, "cosine": 1.0}
TEMPERATURE = 2.0


class Padded(NamedTuple):
    """Hold sequences as the baseline takes them, each [B, L] and int64."""

    input_ids: Tensor  # corrupted
    attention_mask: Tensor  # 1 at tokens, 0 at padding
    labels: Tensor  # -100 where nothing is predicted


def padded(batch: MicroBatch, *, pad_id: int) -> Padded:
    """Return the same rows and masks as padded sequences.

    The work is the same only if no row holds two documents.
    """
    labels = torch.full_like(batch.input_ids, IGNORE).scatter(1, batch.positions, batch.labels)
    return Padded(batch.input_ids, (batch.input_ids != pad_id).long(), labels)


@dataclass
class BaselineStep:
    """Compute the forward and backward pass of one micro-batch; add gradients to the student's.

    Args:
        student, teacher: see `twin`; the teacher is frozen and in eval mode.
        batch: on their device.
        kl_positions: "all" tokens but padding, or "masked" ones.
        precision: of the forward pass; its loss scale multiplies the loss.
        weights: of the terms, each a mean over its positions; one of weight 0 is not computed.
    """

    student: MaskedLM
    teacher: MaskedLM
    batch: Padded
    kl_positions: str = "all"
    precision: Precision = PRECISIONS["fp32"]
    temperature: float = TEMPERATURE
    weights: dict[str, float] = field(default_factory=lambda: dict(WEIGHTS))
    terms: dict[str, float] = field(default_factory=dict)  # means of the last call

    def __call__(self) -> None:
        """Run forward and backward of one micro-batch; gradients add up."""
        with self.precision.autocast(self.batch.input_ids.device):
            means = self.losses()
            loss = torch.stack([self.weights[name] * mean for name, mean in means.items()]).sum()
        (loss * self.precision.loss_scale).backward()
        self.terms = {name: mean.item() for name, mean in means.items()}

    def losses(self) -> dict[str, Tensor]:
        """Return the mean of each term whose weight is above 0, with its graph."""
        input_ids, attention_mask, labels = self.batch
        inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask}
        inputs |= {"output_hidden_states": True, "return_dict": True}
        student = self.student(**inputs)
        with torch.no_grad():
            teacher = self.teacher(**inputs)
        tokens = attention_mask.bool()
        restricted = labels != IGNORE if self.kl_positions == "masked" else tokens

        means = {}
        if self.weights.get("kl"):
            student_NV = selected(student.logits, restricted)
            teacher_NV = selected(teacher.logits, restricted)
            log_q = F.log_softmax(student_NV / self.temperature, dim=-1)
            p = F.softmax(teacher_NV / self.temperature, dim=-1)
            means["kl"] = nn.KLDivLoss(reduction="batchmean")(log_q, p) * self.temperature**2
        if self.weights.get("mlm"):
            vocabulary = student.logits.shape[-1]
            cross_entropy = nn.CrossEntropyLoss(ignore_index=IGNORE)
            means["mlm"] = cross_entropy(student.logits.view(-1, vocabulary), labels.view(-1))
        if self.weights.get("cosine"):
            student_ND = selected(student.hidden_states[-1], tokens)
            teacher_ND = selected(teacher.hidden_states[-1], tokens)
            same = student_ND.new_ones(len(student_ND))
            means["cosine"] = nn.CosineEmbeddingLoss()(student_ND, teacher_ND, same)
        return means

    def encoders(self) -> Any:
        """Return the encoders' outputs alone, which keeps all that their graph holds alive."""
        input_ids, attention_mask, _ = self.batch
        hidden = []
        with self.precision.autocast(input_ids.device):
            for model, gradients in ((self.student, True), (self.teacher, False)):
                with torch.set_grad_enabled(gradients):
                    outputs = model.base_model(input_ids=input_ids, attention_mask=attention_mask)
                hidden.append(outputs.last_hidden_state)
        return hidden


def selected(values_BLX: Tensor, mask_BL: Tensor) -> Tensor:
    """Return a copy of the positions of a mask [N, X]."""
    width = values_BLX.shape[-1]
    return values_BLX.masked_select(mask_BL[:, :, None].expand_as(values_BLX)).view(-1, width)


def twin(model: Model) -> Model:
    """Return the same model and parameters with torch's layers.

    It has its own configuration and dropout; weights and their gradients are shared.
    """
    shared: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    other = copy.deepcopy(model, shared)
    use_torch_layers(other)
    return other
