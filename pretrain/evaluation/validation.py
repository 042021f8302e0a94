"""Evaluate models on validation rows, with the figures of a task.

Shapes: T terms, C counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn

from pretrain.contracts.terms import TeacherLabels
from pretrain.model.distillation import Distillation
from pretrain.model.families import MaskedLM
from pretrain.model.student import build_student
from pretrain.model.teacher import (
    Teacher,
    parameters_sha256,
)
from pretrain.run_folder import noted_layers, recorded, sealed_state
from pretrain.tasks.task import Measure

UNTRAINED = "the same layers, untrained"


def evaluate(
    student: MaskedLM,
    teacher: MaskedLM | None,
    measure: Measure,
    *,
    rows: int,
    batch_size: int = 32,
    accelerator: Accelerator,
    autocast: AbstractContextManager[Any] | None = None,
    adapters: nn.ModuleDict | None = None,
    step: int = 0,
    teacher_labels: TeacherLabels | None = None,
) -> dict[str, float]:
    """Return the figures of a task on `rows` validation rows, divided among the ranks.

    Args:
        student, teacher: on the accelerator's device.
        measure: of the task.
        rows: fewer if there are fewer.
        batch_size: rows at a time.
        accelerator: of this rank.
        autocast: the precision; the accelerator's by default.
        adapters: those of the terms.
        step: whose weights a loss of several terms has.
        teacher_labels: see `Distillation`.
    """
    examples, terms, shards = measure.examples, measure.terms, measure.examples.shards
    numbers = np.arange(len(shards)) if measure.places is None else measure.places
    rows = min(rows, len(numbers))
    first = np.arange(rows)
    numbers = numbers[first * len(numbers) // max(rows, 1) if measure.spread else first]
    mine = np.array_split(numbers, accelerator.num_processes)[accelerator.process_index]
    module = Distillation(
        student,
        teacher,
        terms,
        pad_id=examples.special.pad,
        num_tokens=shards.manifest.tokenizer.vocab_size,
        adapters=adapters,
        teacher_labels=teacher_labels,
    )
    ones = torch.ones(len(terms), device=accelerator.device)

    # Sums of this rank, in fp64, because sums of many batches are added: one entry per term, one
    # per count, then those that the task tallies.
    # Without dropout. Training goes on in the mode it was in.
    was_training = student.training
    student.eval()
    module.adapters.eval()  # a task's head has dropout, too
    totals_T = torch.zeros(len(terms), dtype=torch.float64)
    counts_C = torch.zeros(len(measure.counts), dtype=torch.float64)
    tally_X = torch.zeros(measure.tallies, dtype=torch.float64)
    with torch.no_grad(), autocast or accelerator.autocast():
        for some in np.array_split(mine, -(-len(mine) // batch_size) or 1):
            if len(some) == 0:  # more ranks than rows
                continue
            batch = examples.batch(examples.rows(shards.rows(some), np.zeros_like(some), some))
            counts_C += torch.tensor([batch.counts[name] for name in measure.counts])
            _, values = module(batch.to(accelerator.device), ones)
            totals_T += values.cpu()  # device sync, once per batch
            if measure.tally is not None:
                tally_X += measure.tally(batch)
    student.train(was_training)
    module.adapters.train(was_training)
    if accelerator.num_processes > 1:
        sums = torch.cat([totals_T, counts_C, tally_X])
        sizes = [len(totals_T), len(counts_C), len(tally_X)]
        sums = accelerator.reduce(sums.to(accelerator.device), "sum").cpu()
        totals_T, counts_C, tally_X = sums.split(sizes)
    totals = dict(zip((term.name for term in terms), totals_T.tolist(), strict=True))
    counts = dict(zip(measure.counts, counts_C.tolist(), strict=True))
    return measure.figures(totals, counts, tally_X, step)


def students_at_start(
    models: Sequence[str], teacher: Teacher, *, needs_head: bool = True
) -> dict[str, MaskedLM]:
    """Return the students of runs as they were at step 0, equal ones once, each with its name.

    The layers are those that a run has noted, whatever is the default today. A model that is not a
    run, or did not start from layers of this teacher, has none.
    """
    found: dict[tuple[object, ...], tuple[str, MaskedLM]] = {}
    weights = teacher.sha256
    for name in models:
        sealed, config = sealed_state(Path(name)), recorded(Path(name))
        layers = noted_layers(sealed[1]) if sealed is not None else ()
        if sealed is None or config is None or not layers:
            continue
        weights = weights or parameters_sha256(teacher.model)
        begun = config.student
        sizes = begun.hidden_size, begun.num_attention_heads, begun.intermediate_size
        key = (layers, begun.architecture, sizes)
        if key in found or sealed[1]["teacher"]["sha256"] != weights:
            continue
        begun = begun.model_copy(update={"init": layers, "num_layers": None})
        model = build_student(begun, teacher, config.train.seed, needs_head=needs_head)
        found[key] = name, model.eval()
    return {
        UNTRAINED if len(found) == 1 else f"{Path(name).name}, untrained": model
        for name, model in found.values()
    }
