"""Implement `distil report`: tell how runs are doing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from launch.console import show


def report(
    runs: Annotated[list[Path], typer.Argument(help="Output folders of runs.", metavar="RUN...")],
) -> None:
    """Tell how runs are doing: alive or not, position, time left, losses, validation, last error.

    It reads what a run writes, also while it trains, and on another machine. `watch -n 5 distil
    report RUN` repeats it.

    Example: distil report runs/demo/student
    """
    from pretrain import RunError
    from pretrain.monitor.report import report as report_of

    found, missing = list[str](), list[str]()
    for run in runs:
        try:
            found += report_of(run)
        except RunError as error:
            missing.append(str(error))
    if not found:
        raise RunError(missing[0])
    show(*found, *missing)
