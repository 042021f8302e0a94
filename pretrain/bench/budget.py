"""Count the memory of a run before it has weights: by the shapes of a micro-step of its sizes.

Nothing is read and hardly any memory is taken, so a login node can answer for a GPU.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pretrain.bench import models
from pretrain.bench.baseline import shapes_of
from pretrain.bench.footprint import Counter, like_a_gpu, shapes_only
from pretrain.config import RunConfig
from pretrain.contracts.batch import Batch
from pretrain.contracts.terms import DISTILBERT_NAMES
from pretrain.device.precision import PRECISIONS
from pretrain.model.distillation import Distillation
from pretrain.model.families import FAMILIES, MaskedLM
from pretrain.model.families.distil_bert import DistilBert
from pretrain.plan import Planned, Sizes
from pretrain.tasks.mlm.masking import Masking

_SPECIAL = {"pad": 0, "cls": 1, "sep": 2, "mask": 3}
_LARGE = 2**14  # positions, from which on memory grows in a line


class Budget:
    """Count what a process of a run keeps in memory.

    Gradients and AdamW's two moments are in fp32. Not counted: the head of a task, the inside of
    kernels, the allocator's rounding and what CUDA or Python take for themselves.

    Args:
        config: the run, with a precision.
        student, teacher: sizes; the student is a Transformer.
        rows: of the shards; those of a micro-batch are taken as full.
        device: "cpu" or "cuda", which need not be here.
    """

    def __init__(
        self, config: RunConfig, student: Sizes, teacher: Sizes | None, rows: Planned, device: str
    ) -> None:
        rows = rows._replace(vocab_size=max(rows.vocab_size, len(_SPECIAL) + 1))
        self.config, self.rows, self.device = config, rows, device
        objective = config.objective
        self.dtype = PRECISIONS[config.train.precision].dtype
        trained, frozen = _model(student, rows, config), None
        if teacher is not None and (objective.compares or objective.replaces):
            frozen = _model(teacher, rows, None)
            nn.Module.to(frozen, torch.float32 if objective.replaces else self.dtype)
        shapes = shapes_of(trained, frozen)
        self.module = Distillation(
            trained,
            frozen,
            objective.terms(*shapes),
            pad_id=_SPECIAL["pad"],
            adapters=objective.adapters(*shapes),
            recompute=config.train.activation_checkpointing,
            predecessor=frozen if objective.replaces else None,
        )
        # What no term reaches, such as an LM head that no loss reads, is not trained.
        self.trained = sum(p.numel() for p in self._micro_step(1)[1])
        self.teacher, self.held = 0, {"student": sum(p.nbytes for p in trained.parameters())}
        if frozen is not None:
            self.teacher = sum(p.numel() for p in frozen.parameters())
            self.held["teacher"] = sum(p.nbytes for p in frozen.parameters())
        self.held |= {"gradients": 4 * self.trained, "AdamW": 8 * self.trained}

    @cache  # noqa: B019 as long as the process, which is short
    def micro_step(self, num: int, *, held: bool) -> int:
        """Return the peak bytes of a micro-step of `num` rows above `self.held`.

        With `held` gradients lie there already: of an earlier micro-batch, or in buckets of DDP.
        Else they take the place of activations as these are freed. Large micro-batches are on the
        straight line through two smaller ones, which takes seconds.
        """
        few = max(1, _LARGE // self.rows.row_length)
        if num > 2 * few:
            small, large = (self.micro_step(n, held=held) for n in (few, 2 * few))
            return large + (large - small) * (num - 2 * few) // few
        peak, _ = self._micro_step(num, held=held)
        return peak if held else max(0, peak - self.held["gradients"])

    def _micro_step(self, num: int, *, held: bool = False) -> tuple[int, list[nn.Parameter]]:
        """Return the peak bytes above weights and gradients, and what is trained."""
        length, vocabulary = self.rows.row_length, self.rows.vocab_size
        ids = tuple(_SPECIAL.values())
        share = max(end or 0.0 for end in self.config.masking.ends)
        masking = Masking(share, ids, mask_id=ids[-1], vocab_size=vocabulary, seed=0)
        special = models.SpecialIds(*ids[:3])
        document = np.full(length, vocabulary - 1)  # no special one
        document[0], document[-1] = special.cls, special.sep
        width = (self.module.teacher or self.module.student).config.hidden_size
        batch, labels = self.config.task.drawn(
            models.batch([[document]] * num, length, masking, special), width, pad_id=special.pad
        )
        like = like_a_gpu() if self.device == "cuda" else nullcontext()
        with like, shapes_only(self.module) as shapes:
            shapes._teacher_labels = labels
            parameters = [p for p in shapes.parameters() if p.requires_grad]
            if held:
                for parameter in parameters:
                    parameter.grad = torch.empty_like(parameter)
            with Counter() as counter:
                batch = batch.to(torch.device("cpu"))
                with torch.autocast("cpu", self.dtype, enabled=self.dtype != torch.float32):
                    loss = self._loss(shapes, batch)
                loss.backward()
        return counter.peak, [p for p in parameters if p.grad is not None]

    def _loss(self, module: Distillation, batch: Batch) -> Tensor:
        running = self.config.objective.heaviest(module.student.config.num_hidden_layers)
        if not self.config.task.has_head:
            loss: Tensor = module(batch, torch.ones(len(module.terms)), running)[0]
            return loss
        # The labels of a task are small: its encoders are what takes memory.
        _, student, _ = module.encode(batch, running)
        outputs = [student.last_hidden_state, *student.signals.values()]
        return torch.stack([output.float().sum() for output in outputs]).sum()


def _model(sizes: Sizes, rows: Planned, config: RunConfig | None) -> MaskedLM:
    """Return a model without values: in training with the run's dropout, or frozen."""
    family = FAMILIES[sizes.family]
    values: dict[str, Any] = sizes._asdict()
    if values.pop("family") == DistilBert.model_type:
        values = {DISTILBERT_NAMES[name]: size for name, size in values.items()}
    values |= {"vocab_size": rows.vocab_size, "max_position_embeddings": rows.row_length}
    if config is not None:
        if (own := config.model) is not None:
            rates = own.hidden_dropout_prob, own.attention_probs_dropout_prob
        else:
            rates = config.student.dropout, config.student.attention_dropout
        values |= family.rates(*rates)
    with torch.device("meta"):
        model = family.architecture(family.new_config(values, _SPECIAL))
    return model.train() if config is not None else model.eval().requires_grad_(False)
