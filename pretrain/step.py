"""Make one optimizer step, from packed rows to updated weights.

The loss, for the terms t of `contracts/terms.py`, each over all micro-batches and ranks:

    loss = sum_t weight_t * total_t / count_t

Counts are known on the host before the first micro-batch, so 8 rows at once, 2 x 4 rows and two
ranks of 4 rows train the same.

Shapes: A micro-batches of this rank in a step, T terms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from pretrain import NonFiniteError
from pretrain.config import Optimizer
from pretrain.contracts.batch import Batch, Rows, send
from pretrain.data.hashing import root
from pretrain.data.rows import split
from pretrain.monitor.post_mortem import write_post_mortem
from pretrain.run import Run

_DROPOUT = 3  # this use of the seed; order and masking have other numbers


class Step(NamedTuple):
    """Hold the figures of one optimizer step; the same on every rank."""

    counts: dict[str, int]  # the task's own counts
    weights: list[float]  # [T] of the terms, at this step
    totals: list[float]  # [T] each term's sum
    grad_norm: float  # before clipping; not finite if no update was made
    learning_rate: float


def train_step(run: Run, rows: Rows | None, signals: Sequence[int]) -> Step | None:
    """Make one optimizer step on this rank's rows; return None if a rank was interrupted.

    A run of one rank is also interrupted between two micro-batches; several ranks have agreed
    before the first one, and finish the step.

    Args:
        run: its state advances by one step.
        rows: the rank's share of the step; None if a signal came while it waited for them.
        signals: those that this rank got; with one before the step no rank makes it.

    Raises:
        NonFiniteError: more steps than `train.skip_non_finite` were not finite.
    """
    accelerator, parallel, heartbeat = run.accelerator, run.parallel, run.heartbeat
    config, state, terms = run.config, run.state, run.module.terms
    device, rank, world = accelerator.device, accelerator.process_index, accelerator.num_processes

    # Count the tokens of the whole step. This is the only communication before the last
    # micro-batch (with several ranks a device sync), and with it all ranks agree to stop at the
    # same step.
    # Without rows (a signal came) the rank still takes part in the sum, because the others wait for
    # it there.
    batches = []
    if rows is not None:
        heartbeat.at(state.step, "counts")
        batches = micro_batches(run, rows)
    names = config.task.counts
    numbers = [*(sum(b.counts[name] for b in batches) for name in names), int(bool(signals))]
    if world > 1:
        numbers = accelerator.reduce(torch.tensor(numbers, device=device), "sum").tolist()
    counts = dict(zip(names, numbers, strict=False))
    if rows is None or numbers[-1]:
        return None

    # Dropout is a function of (seed, step, rank), so that a resumed run draws the same masks.
    torch.manual_seed(root(config.train.seed, _DROPOUT, state.step, rank))

    # Forward and backward. The LM head computes its gradients in its forward pass. The loss is
    # divided by the number of tokens only in the backward pass, together with the loss scale, so
    # these gradients stay of order 1 and within fp16's range. Hence the factors
    # weight * tokens / count here.
    weights = [term.weight(state.step) for term in terms]
    factors = [
        weight * counts["tokens"] / max(counts[term.over], 1)
        for weight, term in zip(weights, terms, strict=True)
    ]
    factors_T = send(torch.tensor(factors), device)
    num_layers = run.student.config.num_hidden_layers
    running = config.objective.running(state.step, config.train.seed, num_layers)
    losses, totals = [], []
    for i, batch in enumerate(batches):
        if world == 1 and signals:
            parallel.discard(clipped=False)
            return None
        heartbeat.at(state.step, "forward")
        last = i == run.accumulation - 1
        loss, totals_T = parallel.forward_backward(
            batch.to(device), factors_T, 1 / max(counts["tokens"], 1), last=last, running=running
        )
        losses.append(loss)
        totals.append(totals_T)

    # Clip, and read the step's figures (device sync).
    heartbeat.at(state.step, "update")
    rate = learning_rate(config.optimizer, state.step, run.num_steps)
    norm = parallel.clip(config.optimizer.max_grad_norm)
    losses_A, totals_AT = torch.stack(losses), torch.stack(totals)
    num_bad = (~losses_A.isfinite()).sum().reshape(1)
    figures = torch.cat([totals_AT.sum(0), num_bad.to(totals_AT)])
    if world > 1:
        figures = accelerator.reduce(figures, "sum")
    *totals_of_step, bad, size = torch.cat([figures, norm.reshape(1).to(figures)]).tolist()

    # Update on all ranks, or on none. In fp16 an infinite norm means that scaled gradients
    # overflowed: the scaler then skips the update and halves the scale.
    if bad == 0 and (math.isfinite(size) or (parallel.loss_scale or 1) > 1):
        parallel.step(rate)
    else:
        parallel.discard()
        state.skipped_steps += 1
        allowed = config.train.skip_non_finite
        if state.skipped_steps > allowed:
            raise NonFiniteError(write_post_mortem(run, losses_A, totals_AT, size, rate))
        values = {"skipped_steps": state.skipped_steps}
        # The figures were summed over all ranks, so all ranks take this branch together.
        run.metrics.write("skipped", state.step + 1, values)
        run.progress.say(
            f"warning: step {state.step + 1}: its loss or gradient is not finite; it was left out, "
            f"{state.skipped_steps} of at most {allowed}"
        )
        # Tells `report` that this step has no figures to log.
        size = math.nan
    state.step += 1
    state.tokens += counts["tokens"]
    return Step(counts, weights, totals_of_step, size, rate)


def micro_batches(run: Run, rows: Rows) -> list[Batch]:
    """Split a rank's rows of a step into micro-batches, on the host."""
    return [run.dataset.examples.batch(part) for part in split(rows, run.micro_batch_size)]


def learning_rate(config: Optimizer, step: int, num_steps: int) -> float:
    """Return the rate of a step, counted from 0: up to the peak in a line, then towards 0."""
    peak, warmup, start = (
        config.learning_rate,
        config.warmup(num_steps),
        config.decay_start(num_steps),
    )
    # The first step is not 0, or it would train nothing.
    if step < warmup:
        return peak * (step + 1) / warmup
    if step < start:
        return peak
    if config.schedule == "cosine":
        return peak * (1 + math.cos(math.pi * (step - start) / (num_steps - start))) / 2
    return peak * (num_steps - step) / (num_steps - start)
