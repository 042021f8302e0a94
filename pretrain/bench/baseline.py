"""The usual distillation step, the baseline: as the formulas read, on whole tensors.

DistilBERT's triple loss (arXiv 1910.01108, section 3) as it is commonly written: both models are
called as Transformers has them, with padded sequences, a 2-D attention mask and `sdpa` attention;
the logits of both exist in full at every position; the positions that count are copied out with
`masked_select`; and each term is read back with `.item()`.

Shapes: B sequences, L length, V vocabulary, D width, N selected positions.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertForMaskedLM

from pretrain.data.masking import IGNORE
from pretrain.device.precision import PRECISIONS, Precision
from pretrain.kernels.cpu_layers import use_torch_layers
from pretrain.model.distillation import MicroBatch
from pretrain.model.encoder import MaskedLM

Model = TypeVar("Model", bound=MaskedLM)

WEIGHTS = {"kl": 5.0, "mlm": 2.0, "cosine": 1.0}
TEMPERATURE = 2.0


class Padded(NamedTuple):
    """Sequences as the usual step takes them, each [B, L] and int64."""

    input_ids: Tensor  # corrupted
    attention_mask: Tensor  # 1 at tokens, 0 at padding
    labels: Tensor  # -100 where nothing is predicted


def padded(batch: MicroBatch, *, pad_id: int) -> Padded:
    """Return the same rows and masks; that is the same work only where no row holds two
    documents."""
    labels = torch.full_like(batch.input_ids, IGNORE).scatter(1, batch.positions, batch.labels)
    return Padded(batch.input_ids, (batch.input_ids != pad_id).long(), labels)


@dataclass
class UsualStep:
    """Forward and backward pass of one micro-batch; gradients are added to the student's.

    Args:
        student, teacher: see `twin`; the teacher is frozen and in eval mode.
        batch: on their device.
        weights: of the terms, each a mean over its positions; one of weight 0 is not computed.
        kl_positions: "all" tokens but padding, or "masked" ones.
        precision: of the forward pass; its loss scale multiplies the loss.
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
        """Make the step."""
        with self.precision.autocast(self.batch.input_ids.device):
            means = self.losses()
            loss = torch.stack([self.weights[name] * mean for name, mean in means.items()]).sum()
        (loss * self.precision.loss_scale).backward()
        self.terms = {name: mean.item() for name, mean in means.items()}

    def losses(self) -> dict[str, Tensor]:
        """Return the mean of each term whose weight is above 0, as a graph."""
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

    def trunk(self) -> Any:
        """Return what the trunks' forward passes alone leave alive."""
        input_ids, attention_mask, _ = self.batch
        hidden = []
        with self.precision.autocast(input_ids.device):
            for model, gradients in ((self.student, True), (self.teacher, False)):
                trunk = model.bert if isinstance(model, BertForMaskedLM) else model.distilbert
                with torch.set_grad_enabled(gradients):
                    outputs = trunk(input_ids=input_ids, attention_mask=attention_mask)
                hidden.append(outputs.last_hidden_state)
        return hidden


def selected(values_BLX: Tensor, mask_BL: Tensor) -> Tensor:
    """Return the positions of a mask, copied out [N, X]."""
    width = values_BLX.shape[-1]
    return values_BLX.masked_select(mask_BL[:, :, None].expand_as(values_BLX)).view(-1, width)


def twin(model: Model) -> Model:
    """Return the same model around the same parameters, with Transformers' attention and torch's
    layers.

    Its configuration and its dropout are its own; weights and their gradients are one.
    """
    shared: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    other = copy.deepcopy(model, shared)
    other.set_attn_implementation("sdpa")
    use_torch_layers(other)
    return other
