"""Send metrics to TensorBoard or Weights & Biases, through Accelerate."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import WandBTracker

from pretrain import RunError
from pretrain.config import RunConfig

_PROJECT = "distil"  # the project in W&B, unless WANDB_PROJECT is set


def asked_for(config: RunConfig) -> list[Any]:
    """Return the trackers as Accelerate takes them; they write nothing before `begin`."""
    return [_wandb(config) if name == "wandb" else name for name in config.logging.trackers]


def begin(accelerator: Accelerator) -> list[str]:
    """Begin all trackers, on the first rank; return where each one can be seen.

    Raises:
        RunError: W&B has no key, or cannot be reached.
    """
    try:
        accelerator.init_trackers("tensorboard")
    except Exception as error:
        accelerator.trackers.clear()  # else one that has not begun is finished
        if type(error).__module__.split(".")[0] != "wandb":
            raise
        raise RunError(
            f"logging.trackers: wandb: {error} Or set WANDB_MODE=offline, and upload later"
        ) from error
    shown = []
    for tracker in accelerator.trackers:
        if isinstance(tracker, WandBTracker):
            run = tracker.run
            shown.append(f"wandb sync {Path(run.dir).parent}" if run.offline else run.url)
        else:
            shown.append(f"tensorboard --logdir {accelerator.logging_dir}")
    return shown


def _wandb(config: RunConfig) -> WandBTracker:
    """Return a tracker that continues the W&B run of an earlier start in this output."""
    import wandb

    # offline-run-DATE_TIME-ID, or run-DATE_TIME-ID.
    begun = sorted(config.output.glob("wandb/*run-*-*"), key=lambda path: path.stat().st_mtime)
    return WandBTracker(
        os.environ.get("WANDB_PROJECT", _PROJECT),
        name=config.output.name,
        dir=config.output,
        config=config.model_dump(mode="json"),
        id=begun[-1].name.rsplit("-", 1)[1] if begun else None,
        resume="allow",
        # What is printed is in the run's own log. An address of git may hold a password.
        settings=wandb.Settings(console="off", disable_git=True, silent=True),
    )
