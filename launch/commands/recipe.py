"""Implement `distil recipe`: make the stages of a recipe one after the other."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Annotated

import typer

from launch.commands import Config, Overrides
from launch.console import keep_going, show
from launch.torchrun.hardware import PRESET_NAMES
from pretrain.exit_codes import ExitCode
from pretrain.signals import end_on_signal


def recipe(
    config: Config,
    overrides: Overrides = None,
    gpus: Annotated[
        int | None, typer.Option(help="Processes for each run, as in `distil launch`.", min=1)
    ] = None,
    hardware: Annotated[
        str | None, typer.Option(help=f"One of {PRESET_NAMES}.", metavar="NAME")
    ] = None,
    accept_code: Annotated[
        bool,
        typer.Option(
            "--accept-code",
            help="Keep finished shards that other code of the same behaviour made, and record it.",
        ),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the runs, start none.")] = False,
) -> None:
    """Make the stages of a recipe in their order; the same command continues where it was.

    A stage trains (the default), prepares a corpus, evaluates or exports. Each compares its config,
    corpus and models with what it recorded. A finished one is reported as up to date. The first
    that fails ends the recipe with its exit code.

    Example: distil recipe configs/own-encoder.yaml runs.1.train.max_steps=1000
    """
    with end_on_signal():
        from launch.config import config_line, load_config
        from launch.recipe_config import Recipe
        from launch.stages.stage import How
        from launch.stages.table import check_all, stage_of

        entries, how = (
            load_config(Recipe, config, overrides or []).runs,
            How(gpus, hardware, accept_code),
        )
        stages = [stage_of(entry) for entry in entries]
        lines = check_all(stages, how, dry_run=dry_run)
        if not dry_run:
            keep_going()
        show(config_line(config))
    for number, stage in enumerate(stages, start=1):
        first, *more = map(str, stage.outputs())
        place = f"{first} and {len(more)} more" if len(more) > 2 else ", ".join([first, *more])
        show("", f"run {number} of {len(stages)}: {place}, {stage.title} ({stage.state()})")
        if dry_run:
            show(*lines[number - 1])
            continue
        # Training saves at a signal; other stages continue after the last file that they wrote.
        with nullcontext() if stage.saves else end_on_signal("stopped; the same command continues"):
            code = stage.run(how)
        if code != ExitCode.DONE:
            raise typer.Exit(code)
