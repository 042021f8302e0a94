"""The report about a step whose loss or gradient was not finite.

Shapes: A micro-batches of a rank in a step, T terms.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pretrain.files import write_json
from pretrain.monitor.safety import culprits, post_mortem
from pretrain.run import Run


def write_post_mortem(
    run: Run, losses_A: Tensor, totals_AT: Tensor, norm: float, rate: float
) -> str:
    """Write post_mortem.json for a step that was not finite, and return one line; all ranks call.

    Args:
        run: at that step.
        losses_A: of this rank's micro-batches.
        totals_AT: of their terms.
        norm: of the gradient before clipping.
        rate: the learning rate.
    """
    accelerator, shards = run.accelerator, run.config.shards
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
