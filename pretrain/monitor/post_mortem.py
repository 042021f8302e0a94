"""Report on a step whose loss or gradient was not finite.

Shapes: A micro-batches of a rank in a step, T terms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrain.files import write_json
from pretrain.run import Run

_SHOWN = 16  # rows named in a message


def write_post_mortem(
    run: Run, losses_A: Tensor, totals_AT: Tensor, norm: float, rate: float
) -> str:
    """Write post_mortem.json for a step that was not finite; return a line. All ranks call it.

    Args:
        run: at that step.
        losses_A: of this rank's micro-batches.
        totals_AT: of their terms.
        norm: of the gradient before clipping.
        rate: the learning rate.
    """
    accelerator, shards = run.accelerator, run.config.shards
    # Collective, so it comes before the branch on the main process.
    gathered = accelerator.gather(torch.cat([losses_A[:, None], totals_AT], dim=1)[None])
    values = gathered.tolist()  # [processes, A, 1 + T]
    _, numbers = run.dataset.order.at(run.state.step)
    share = len(numbers) // accelerator.num_processes
    rows = [numbers[i : i + share].tolist() for i in range(0, len(numbers), share)]
    file = run.config.output / "post_mortem.json"
    report, line = post_mortem(
        step=run.state.step + 1,
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


@dataclass(frozen=True)
class Culprit:
    """Hold a micro-batch whose loss is not finite."""

    rank: int
    micro_batch: int  # of its rank, from 0
    rows: tuple[int, ...]  # row numbers in the train split
    loss: float
    terms: Mapping[str, float]  # sum of each term over the micro-batch


def culprits(
    rows: Sequence[Sequence[int]],
    losses: Sequence[Sequence[float]],
    sums: Sequence[Sequence[Sequence[float]]],
    names: Sequence[str],
) -> list[Culprit]:
    """Return every micro-batch of a step whose loss is not finite, from the values of all ranks.

    Args:
        rows: [W, R] row numbers of each rank, in the order of its micro-batches.
        losses: [W, A] of each micro-batch.
        sums: [W, A, T] of each term.
        names: [T] of the terms.
    """
    found = []
    for rank, (numbers, of_rank, terms) in enumerate(zip(rows, losses, sums, strict=True)):
        size = len(numbers) // len(of_rank)
        for i, (loss, values) in enumerate(zip(of_rank, terms, strict=True)):
            if not math.isfinite(loss):
                mine = tuple(numbers[i * size : (i + 1) * size])
                found.append(Culprit(rank, i, mine, loss, dict(zip(names, values, strict=True))))
    return found


def post_mortem(
    *,
    step: int,
    rows: Sequence[int],
    culprits: Sequence[Culprit],
    grad_norm: float,
    learning_rate: float,
    loss_scale: float | None,
    metrics: Mapping[str, Any] | None,
    shards: Path,
    file: Path,
) -> tuple[dict[str, Any], str]:
    """Return the content of `file` and one line for the screen, about a step that is not finite.

    Args:
        step: counted from 1, as in the log.
        rows: all rows of the step; named if only the gradient is not finite.
        culprits: the micro-batches of all ranks whose loss is not finite.
        grad_norm: of the whole gradient, before clipping.
        learning_rate: of this step.
        loss_scale: of fp16; None in other precisions.
        metrics: the last entry of metrics.jsonl before the step.
        shards: the folder of the rows.
        file: where the caller writes the dictionary.
    """
    # With finite losses and a gradient that is not, no row can be singled out: gradients are summed
    # over all ranks before they are checked.
    bad = [row for culprit in culprits for row in culprit.rows] or list(rows)
    ranks = sorted({culprit.rank for culprit in culprits})
    what = f"loss is {culprits[0].loss}" if culprits else f"gradient norm is {grad_norm}"
    where = f" of rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else ""
    shown = ", ".join(map(str, bad[:_SHOWN])) + (", ..." if len(bad) > _SHOWN else "")
    remedies = [
        "lower optimizer.learning_rate",
        f"look at a row: distil audit {shards} --row {bad[0]}",
        f"leave rows out: --skip-rows {bad[0]}:{bad[0] + 1}",
        "go on over up to N such steps: train.skip_non_finite=N",
    ]
    if culprits and set(bad) == set(rows):
        remedies.insert(0, "no row is spared: look at the weights that it started from")
    report = {
        "step": step,
        "what": what,
        "ranks": ranks,
        "rows": bad,
        "micro_batches": [asdict(culprit) for culprit in culprits],
        "grad_norm": grad_norm,
        "learning_rate": learning_rate,
        "loss_scale": loss_scale,
        "last_metrics": dict(metrics) if metrics is not None else None,
        "shards": str(shards),
        "file": str(file),
        "remedies": remedies,
    }
    message = (
        f"step {step}: the {what} over rows {shown}{where} ({shards}); the update was not made, "
        f"and no checkpoint was touched; {file} says more. To fix it: {'; '.join(remedies)}"
    )
    # Strict JSON has no NaN, and that is what this report is about.
    return _strict(report), message


def _strict(value: Any) -> Any:
    """Return the value with "nan", "inf" and "-inf" for numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
