"""Implement `distil recipe`: make the stages of a recipe one after the other."""

from __future__ import annotations

from typing import Annotated

import typer

from launch.commands import AcceptCode, Config, Overrides, Tokens
from launch.console import keep_going, show
from launch.torchrun.hardware import PRESET_NAMES
from pretrain.contracts.process import end_on_signal


def recipe(
    config: Config,
    overrides: Overrides = None,
    gpus: Annotated[
        int | None, typer.Option(help="Processes for each run, as in `distil launch`.", min=1)
    ] = None,
    hardware: Annotated[
        str | None, typer.Option(help=f"One of {PRESET_NAMES}.", metavar="NAME")
    ] = None,
    accept_code: AcceptCode = False,
    tokens: Tokens = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the runs, start none.")] = False,
    nodes: Annotated[int | None, typer.Option(hidden=True)] = None,
    slurm: Annotated[bool, typer.Option("--slurm", hidden=True)] = False,
) -> None:
    """Make the stages of a recipe in their order; the same command continues where it was.

    A stage trains (the default), prepares a corpus, evaluates or exports. Each compares its config,
    corpus and models with what it recorded. A finished one is reported as up to date. The first
    that fails ends the recipe with its exit code.

    `distil config keys --kind recipe` explains the keys of its stages.

    Example: distil recipe configs/own-encoder.yaml runs.1.train.max_steps=1000
    """
    with end_on_signal():
        from launch.config import config_line, load_config
        from launch.recipe_config import Recipe
        from launch.stages.stage import How
        from launch.stages.table import check_all, make_all, stage_of
        from launch.torchrun.start import Launch
        from pretrain import RunError

        if nodes is not None or slurm:
            options = " --slurm" * slurm + (f" --nodes {nodes}" if nodes is not None else "")
            raise RunError(
                f"{options.split()[0]} is for another command: distil launch {config}{options}"
            )
        launched = None
        if gpus is not None or hardware is not None:
            launched = Launch(config, [], gpus=gpus, hardware=hardware)
        if tokens is not None and not dry_run:
            raise RunError("--tokens is for --dry-run: add that")
        settings = load_config(Recipe, config, overrides or [])
        how = How(launched, accept_code, tokens, settings.price_per_hour)
        stages = [stage_of(entry) for entry in settings.runs]
        lines = check_all(stages, how, dry_run=dry_run)
        if not dry_run:
            keep_going()
        show(config_line(config))
    if code := make_all(stages, how, lines, dry_run=dry_run):
        raise typer.Exit(code)
