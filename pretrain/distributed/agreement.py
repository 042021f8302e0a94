"""The ranks of a run hold the same weights."""

from __future__ import annotations

from pretrain import DivergedError
from pretrain.monitor.safety import differing, fingerprint
from pretrain.run import Run


def compare_weights(run: Run) -> None:
    """Compare the weights of all ranks: memory and networks do fail.

    Raises:
        DivergedError: on every rank, naming those that differ.
    """
    accelerator = run.accelerator
    if accelerator.num_processes == 1 or run.config.train.compare_every == 0:
        return
    mine = fingerprint(run.student.parameters()).reshape(1)
    odd = differing(accelerator.gather(mine).tolist())
    if odd:
        ranks = " and ".join(f"rank {rank}" for rank in odd)
        raise DivergedError(
            f"step {run.state.step}: {ranks} hold{'s' * (len(odd) == 1)} other weights than the "
            "rest: look for failing memory or network there. No checkpoint was written since the "
            "weights were last the same; the same command continues from there"
        )
