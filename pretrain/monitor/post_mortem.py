"""Report on a step whose loss or gradient was not finite.

Shapes: A micro-batches of a rank in a step, T terms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from data_prep.disk.replacing import replace_json
from pretrain.run import Run

_SHOWN = 16  # rows named in a message


def write_post_mortem(
    run: Run, losses_A: Tensor, totals_AT: Tensor, norm: float, rate: float
) -> str:
    """Write post_mortem.json for the step that `run` is at; return a line. All ranks call it.

    Loss and term sums are those of this rank's micro-batches, `norm` is the gradient's before
    clipping, `rate` the learning rate.
    """
    # Collective, so it comes before the branch on the main process.
    values = run.accelerator.gather(torch.cat([losses_A[:, None], totals_AT], dim=1)[None])
    _, rows = run.dataset.order.at(run.state.step)
    file = run.config.output / "post_mortem.json"
    facts = {
        "step": run.state.step + 1,  # counted from 1, as in the log
        "grad_norm": norm,
        "learning_rate": rate,
        "loss_scale": run.parallel.loss_scale,
        "last_metrics": run.metrics.last,
        "shards": str(run.config.shards),
        "file": str(file),
    }
    names = [term.name for term in run.module.terms]
    report, line = post_mortem(facts, rows.tolist(), values.tolist(), names)
    if run.accelerator.is_main_process:
        replace_json(file, report)
    return line


def post_mortem(
    facts: Mapping[str, Any],
    rows: Sequence[int],
    values: Sequence[Sequence[Sequence[float]]],
    names: Sequence[str],
) -> tuple[dict[str, Any], str]:
    """Return the content of post_mortem.json and one line for the screen.

    Args:
        facts: entries of the report that need no finding.
        rows: the row numbers of the whole step, rank by rank and micro-batch by micro-batch.
        values: [ranks, A, 1 + T] the loss of each micro-batch and the sum of each term.
        names: [T] of the terms.
    """
    found: list[dict[str, Any]] = []
    size = len(rows) // sum(map(len, values))
    for rank, of_rank in enumerate(values):
        for i, (loss, *sums) in enumerate(of_rank):
            if not math.isfinite(loss):
                start = (rank * len(of_rank) + i) * size
                found.append(
                    {
                        "rank": rank,
                        "micro_batch": i,
                        "rows": rows[start : start + size],
                        "loss": loss,
                        "terms": dict(zip(names, sums, strict=True)),
                    }
                )
    # With finite losses and a gradient that is not, no row can be singled out: gradients are summed
    # over all ranks before they are checked.
    bad = [row for micro_batch in found for row in micro_batch["rows"]] or rows
    ranks = sorted({micro_batch["rank"] for micro_batch in found})
    what = f"loss is {found[0]['loss']}" if found else f"gradient norm is {facts['grad_norm']}"
    where = f" of rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else ""
    shown = ", ".join(map(str, bad[:_SHOWN])) + (", ..." if len(bad) > _SHOWN else "")
    remedies = [
        "lower optimizer.learning_rate",
        f"look at a row: distil inspect {facts['shards']} --row {bad[0]}",
        f"leave rows out: --skip-rows {bad[0]}:{bad[0] + 1}",
        "skip up to N such steps: train.skip_non_finite=N",
    ]
    if found and set(bad) == set(rows):
        remedies.insert(0, "all rows are affected: check the initial weights")
    message = (
        f"step {facts['step']}: the {what} over rows {shown}{where} ({facts['shards']}); the "
        f"update was not made, and no checkpoint was touched; {facts['file']} says more. To fix "
        f"it: {'; '.join(remedies)}"
    )
    findings = {"what": what, "ranks": ranks, "rows": bad, "micro_batches": found}
    # `step` comes first; a later key of the same name keeps its place.
    report = {"step": facts["step"], **findings, **facts, "remedies": remedies}
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
