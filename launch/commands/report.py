"""Implement `distil report`: tell how runs are doing, on the screen or as an HTML page."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from launch.console import console, show

_EVERY = 5.0  # seconds


def report(
    runs: Annotated[list[Path], typer.Argument(help="Output folders of runs.", metavar="RUN...")],
    html: Annotated[
        Path | None, typer.Option(help="Write one page with curves to this file.", metavar="FILE")
    ] = None,
    text: Annotated[
        bool, typer.Option("--text", help="Show it in the terminal: the default.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show it again every 5 s until all have ended.")
    ] = False,
) -> None:
    """Tell how runs are doing: alive or not, position, time left, losses, validation, last error.

    It reads what a run writes, also while it trains, and on another machine.

    Example: distil report runs/demo/student --html report.html
    """
    from pretrain import RunError
    from pretrain.files import replace_text
    from pretrain.monitor import report as of

    while True:
        found, missing = [], list[str]()
        for run in runs:
            try:
                found.append(of.report(run))
            except RunError as error:
                if len(runs) == 1:
                    raise
                missing.append(str(error))
        if not found:
            raise RunError(missing[0])
        if watch and console.is_terminal:
            console.clear()
        for each in found:
            show(*of.text(each))
        show(*missing)
        if html is not None:
            html.parent.mkdir(parents=True, exist_ok=True)
            replace_text(html, of.html(found))
        if not watch or not any(each.running is not False for each in found):
            break
        time.sleep(_EVERY)
    if html is not None:
        show(f"written: {html}")
