"""The optimizer step: one decision of all processes, and none without finite numbers.

Shapes: A micro-batches of a process in a step, T terms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pretrain import DivergedError, NonFiniteError
from pretrain.build import Run
from pretrain.config import Optimizer
from pretrain.files import write_json
from pretrain.safety import culprits, differing, fingerprint, post_mortem


def learning_rate(config: Optimizer, step: int, num_steps: int) -> float:
    """Linear warm-up to the peak, then linear decay towards 0; `step` counts from 0."""
    warmup = round(config.warmup_ratio * num_steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    return config.learning_rate * (num_steps - step) / (num_steps - warmup)


def update(
    run: Run, losses: Sequence[Tensor], sums: Sequence[Tensor], rate: float
) -> tuple[list[float], float]:
    """Clip and step in all processes, or in none.

    Args:
        losses: this process's micro-batches' [A], each a scalar.
        sums: of their terms [A], each [T].
        rate: the learning rate.

    Returns:
        (each term's sum over all processes, the gradient norm before clipping); a norm that is not
        finite says that no update was made.

    Raises:
        NonFiniteError: more steps than `train.skip_non_finite` were not finite.
    """
    parallel = run.parallel
    parallel.set_learning_rate(rate)
    norm = parallel.clip(run.config.optimizer.max_grad_norm)
    losses_A, sums_AT = torch.stack(list(losses)), torch.stack(list(sums))
    bad = (~losses_A.isfinite()).sum().reshape(1)
    totals = torch.cat([sums_AT.sum(0), bad.to(sums_AT)])
    if run.accelerator.num_processes > 1:
        totals = run.accelerator.reduce(totals, "sum")
    # The step's one read-back; what all processes decide by is the same in each.
    values: list[float] = torch.cat([totals, norm.reshape(1).to(totals)]).tolist()
    *terms, num_bad, size = values
    if num_bad == 0 and (math.isfinite(size) or (parallel.loss_scale or 1) > 1):
        # An infinite norm in fp16 is an overflow: its scaler skips the step and halves its scale.
        parallel.step()
        return terms, size
    parallel.discard()
    run.skipped_steps += 1
    if run.skipped_steps > run.config.train.skip_non_finite:
        raise NonFiniteError(_explain(run, losses_A, sums_AT, size, rate))
    run.metrics.write("skipped", run.step + 1, {"skipped_steps": run.skipped_steps})
    run.progress.say(
        f"warning: step {run.step + 1}: its loss or gradient is not finite; it was left out, "
        f"{run.skipped_steps} of at most {run.config.train.skip_non_finite}"
    )
    return terms, math.nan


def _explain(run: Run, losses_A: Tensor, sums_AT: Tensor, norm: float, rate: float) -> str:
    """Write the post-mortem of a step and return its line; all processes call it."""
    accelerator, shards = run.accelerator, run.config.shards
    gathered = accelerator.gather(torch.cat([losses_A[:, None], sums_AT], dim=1)[None])
    values = gathered.tolist()  # [processes, A, 1 + T]
    _, numbers = run.dataset.order.at(run.step)
    share = len(numbers) // accelerator.num_processes
    rows = [numbers[i : i + share].tolist() for i in range(0, len(numbers), share)]
    file = run.config.output / "post_mortem.json"
    report, line = post_mortem(
        step=run.step + 1,
        rows=numbers.tolist(),
        culprits=culprits(
            rows,
            [[micro[0] for micro in of_rank] for of_rank in values],
            [[micro[1:] for micro in of_rank] for of_rank in values],
            [term.name for term in run.module.terms],
        ),
        grad_norm=norm,
        learning_rate=rate,
        loss_scale=run.parallel.loss_scale,
        metrics=run.metrics.last,
        shards=shards,
        file=file,
    )
    if accelerator.is_main_process:
        write_json(file, report)
    return line


def compare_processes(run: Run) -> None:
    """Hold the weights of all processes against one another: memory and networks do fail.

    Raises:
        DivergedError: in every process, naming those that differ.
    """
    accelerator = run.accelerator
    if accelerator.num_processes == 1 or run.config.train.compare_every == 0:
        return
    mine = fingerprint(run.student.parameters()).reshape(1)
    odd = differing(accelerator.gather(mine).tolist())
    if odd:
        ranks = " and ".join(f"rank {rank}" for rank in odd)
        raise DivergedError(
            f"step {run.step}: {ranks} hold{'s' * (len(odd) == 1)} other weights than the rest: "
            "look for failing memory or network there. No checkpoint was written since the "
            "weights were last the same; the same command continues from there"
        )
