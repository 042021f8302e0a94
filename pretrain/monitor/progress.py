"""Show what a run does: its sizes before the first step, and each step."""

from __future__ import annotations

import math
from typing import Any

import torch

from pretrain.device.precision import PRECISIONS
from pretrain.kernels.attention.dispatch import masked, usable
from pretrain.monitor.metrics import Clock
from pretrain.plan import length_notes
from pretrain.run import Run
from pretrain.step import Step


def describe(run: Run) -> None:
    """Show the sizes of model, data and schedule before the first step."""
    config, accelerator, manifest = run.config, run.accelerator, run.manifest
    say = run.progress.say
    say("; ".join(f"{name}: {kernel}" for name, kernel in run.hardware.items()))
    student: Any = run.student
    saved = student if config.objective.needs.logits else student.base_model
    size = sum(p.numel() for p in saved.parameters())
    teacher = ""
    if run.teacher is not None:
        teacher = f", teacher {run.teacher.model.config.num_hidden_layers} layers"
        teacher += f" ({run.teacher.name})"
    say(
        f"{config.objective.name}: {run.student.config.num_hidden_layers} layers x "
        f"{run.student.config.hidden_size}, {size / 1e6:.1f} M parameters{teacher}"
    )
    split = manifest.splits["train"]
    fill = split.tokens / (split.rows * manifest.row_length)
    validation = (
        f", {len(run.validation):,} validation rows"
        if run.validation
        else "; no validation split: no evaluation"
    )
    say(
        f"{split.rows:,} rows x {manifest.row_length}, {split.tokens:,} tokens "
        f"({fill:.1%} full){validation}"
    )
    say(
        f"{run.num_steps:,} steps of {config.train.global_batch_size} rows = "
        f"{run.micro_batch_size} rows x {run.accumulation} micro-batches x "
        f"{accelerator.num_processes} process(es), {config.train.precision} on "
        f"{accelerator.device.type}{run.parallel.name}"
    )
    if torch.backends.mps.is_available() and accelerator.device.type == "cpu":
        say("note: Apple's GPU (MPS) is not supported: this runs on the CPU")
    for note in length_notes(config, split.rows):
        say(note)
    # Local attention has a kernel only on GPUs with flash attention; it works everywhere.
    device, dtype = accelerator.device, PRECISIONS[config.train.precision].dtype
    models = [run.student.config, *([run.teacher.model.config] if run.teacher else [])]
    for model in models:
        if (window := getattr(model, "local_attention", None)) is None:
            continue
        if (
            usable(device, dtype, model.hidden_size // model.num_attention_heads, window)[0]
            is masked
        ):
            say(
                f"note: {device.type} has no attention kernel with a window: local layers compute "
                "all pairs of tokens of a row, or of its documents where these are fewer"
            )
            break
    if run.state.step:
        say(f"continuing after step {run.state.step:,}")
    for skip in run.dataset.skips:
        say(f"rows {skip.first} to {skip.last - 1} are left out from step {skip.step + 1} on")
        # Only the skips that this start has added. `replay` reads them from here until a checkpoint
        # has them.
        if skip.step == run.state.step:
            values = {"first": skip.first, "last": skip.last}
            run.metrics.write("skip_rows", run.state.step, values)
    run.progress.step(run.state.step, run.num_steps, {})


def report(run: Run, clock: Clock, step: Step) -> None:
    """Show a finished step; if logging is due, write its terms, rates and gradient norm."""
    values: dict[str, float] = {}
    counts, norm = step.counts, step.grad_norm
    # The mean of each term, by the counts of the whole step, as it was trained.
    terms = {
        term.name: total / max(counts[term.over], 1)
        for term, total in zip(run.module.terms, step.totals, strict=True)
    }
    loss = sum(weight * mean for weight, mean in zip(step.weights, terms.values(), strict=True))
    # Not so if scaled gradients overflowed in fp16, or if the step was left out.
    made = math.isfinite(norm)
    if made and counts["tokens"]:
        for warning in run.spikes.warnings(run.state.step, loss, norm):
            run.progress.say(f"warning: {warning}")
    if run.due(run.config.logging.every) and made:
        values = {"loss": loss, **terms, "grad_norm": norm, "learning_rate": step.learning_rate}
        order = run.dataset.order
        epoch = round(run.state.step * order.global_batch_size / order.num_rows, 4)
        values |= {"epoch": epoch, "tokens": run.state.tokens, **clock.rates(run.state.tokens)}
        run.metrics.write("train", run.state.step, values)
    run.progress.step(run.state.step, run.num_steps, values)
