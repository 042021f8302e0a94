"""Implement `distil recipe`: train the runs of a recipe one after the other."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from launch.commands import Config, Overrides, quiet
from launch.console import Training, keep_going, show
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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the runs, start none.")] = False,
) -> None:
    """Train the runs of a recipe in their order; the same command continues where it was.

    Each run compares its config, corpus and teacher with what it recorded. A finished one is
    reported as up to date. The first that fails ends the recipe with its exit code.

    Example: distil recipe configs/minilm-assistant.yaml runs.0.train.max_steps=1000
    """
    with end_on_signal():
        from launch.config import config_line, load_config
        from launch.recipe_config import Recipe, check_order
        from pretrain.config import accumulation_steps
        from pretrain.files import replace_json
        from pretrain.plan import Sizes, plan
        from pretrain.run_folder import check_inputs, check_output

        runs = load_config(Recipe, config, overrides or []).runs
        # A mistake in the last run is answered before the first one trains for days. Its inputs may
        # be outputs of earlier runs.
        made: dict[Path, Sizes | None] = {}
        plans = []
        check_order(runs)
        for run in runs:
            check_output(run)
            check_inputs(run, list(made), needs_shards=not dry_run)
            if not dry_run and hardware is None:
                accumulation_steps(run, gpus or 1)
            plans.append(plan(run, made, needs_shards=not dry_run))
            made[Path(os.path.realpath(run.output))] = plans[-1].student
        if not dry_run:
            keep_going()
        show(config_line(config))
    for number, run in enumerate(runs, start=1):
        show("", f"run {number} of {len(runs)}: {run.output}, objective {run.objective.name}")
        if dry_run:
            show(*plans[number - 1].lines)
            continue
        if gpus is not None or hardware is not None:
            from launch.torchrun.start import Launch, start

            # JSON is YAML: the ranks read the run's config from there. Not from its output, which
            # is not locked yet and where the user's recipe may lie.
            with TemporaryDirectory(prefix="distil-recipe-") as folder:
                path = Path(folder) / f"{run.output.name}.json"
                replace_json(path, run.model_dump(mode="json"))
                code = start(Launch(config=path, overrides=[], gpus=gpus, hardware=hardware))
            if code != ExitCode.DONE:
                raise typer.Exit(code)
            continue
        # In this process: a second run needs no second import of torch.
        from pretrain.train import train

        quiet()
        with Training() as progress:
            outcome = train(run, progress=progress)
        show(f"{run.output}: {outcome.ended}, step {outcome.step:,} of {outcome.num_steps:,}")
        if outcome.ended == "interrupted":
            show("the same command continues")
            raise typer.Exit(ExitCode.REQUEUE)
