"""Implement `distil report`: tell how runs are doing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from launch.console import console, show

_EVERY = 5.0  # seconds


def report(
    runs: Annotated[list[Path], typer.Argument(help="Output folders of runs.", metavar="RUN...")],
    watch: Annotated[
        bool, typer.Option("--watch", help="Show it again every 5 s until all have ended.")
    ] = False,
) -> None:
    """Tell how runs are doing: alive or not, position, time left, losses, validation, last error.

    It reads what a run writes, also while it trains, and on another machine.

    Example: distil report runs/demo/student
    """
    from pretrain import RunError
    from pretrain.monitor import report as of

    while True:
        found, missing, waiting = [], list[str](), False
        for run in runs:
            waits = watch and of.not_begun(run)
            try:
                found.append(of.report(run))
            except RunError as error:
                if len(runs) == 1 and not waits:
                    raise
                missing.append(f"{run}: has not begun; waiting" if waits else str(error))
                waiting |= waits
        if not (found or waiting):
            raise RunError(missing[0])
        if watch and console.is_terminal:
            console.clear()
        for each in found:
            show(*of.text(each))
        show(*missing)
        if not (waiting or (watch and any(each.running is not False for each in found))):
            break
        time.sleep(_EVERY)
