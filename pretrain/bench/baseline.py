"""Compute the baseline: the step of an objective as one would write it with transformers.

`plain.py` has the losses. The baseline sums them with the objective's weights, runs the backward
pass, and reads each term back with `.item()`.

Shapes: B sequences, L length.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pretrain.bench.plain import Inputs, Padded, formulation
from pretrain.data.masking import IGNORE
from pretrain.device.precision import PRECISIONS, Precision
from pretrain.kernels.cpu_layers import use_torch_layers
from pretrain.model.distillation import MicroBatch
from pretrain.model.families import MaskedLM, shape_of
from pretrain.objectives.objective import Objective
from pretrain.objectives.terms import Shape

Model = TypeVar("Model", bound=MaskedLM)


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
        objective: one that `plain.py` knows.
        precision: of the forward pass; its loss scale multiplies the loss.
        adapters: of the objective, on the same device.
    """

    student: MaskedLM
    teacher: MaskedLM | None
    batch: Padded
    objective: Objective
    precision: Precision = PRECISIONS["fp32"]
    adapters: nn.ModuleDict = field(default_factory=nn.ModuleDict)
    terms: dict[str, float] = field(default_factory=dict)  # means of the last call

    def __call__(self) -> None:
        """Run forward and backward of one micro-batch; gradients add up."""
        terms = self.objective.terms(*shapes_of(self.student, self.teacher))
        with self.precision.autocast(self.batch.input_ids.device):
            means = self.losses()
            loss = torch.stack([term.weight(0) * means[term.name] for term in terms]).sum()
        (loss * self.precision.loss_scale).backward()
        # Device sync, once a term: the baseline reads its losses, as plain code does.
        self.terms = {name: mean.item() for name, mean in means.items()}

    def losses(self) -> dict[str, Tensor]:
        """Return the mean of each term with its graph."""
        inputs = Inputs(self.student, self.teacher, self.batch, self.adapters)
        return formulation(self.objective)(self.objective, inputs)

    def encoders(self) -> Any:
        """Return the encoders' outputs alone, which keeps all that their graph holds alive."""
        inputs = Inputs(self.student, self.teacher, self.batch, self.adapters)
        with self.precision.autocast(self.batch.input_ids.device):
            return [each and each.last_hidden_state for each in inputs.outputs()]


def shapes_of(student: MaskedLM, teacher: MaskedLM | None) -> tuple[Shape, Shape | None]:
    """Return the sizes of both models, for an objective; sentence vectors are means of tokens."""
    if teacher is None:
        return shape_of(student), None
    theirs = shape_of(teacher)
    return shape_of(student), theirs._replace(vector_size=theirs.hidden_size)


def twin(model: Model) -> Model:
    """Return the same model and parameters with torch's layers.

    It has its own configuration and dropout; weights and their gradients are shared.
    """
    shared: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    other = copy.deepcopy(model, shared)
    use_torch_layers(other)
    return other
