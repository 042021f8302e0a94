"""Implement `distil pretrain`: train in this process, or as one rank of torchrun."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from launch.commands import (
    Config,
    Overrides,
    SkipRows,
    StopAfter,
    Tokens,
    parse_rows,
    quiet,
)
from launch.console import RUN_LOG, Training, keep_going, show
from launch.torchrun.hardware import PRESET_NAMES
from pretrain.contracts.process import ExitCode, end_on_signal


def pretrain(
    config: Config,
    overrides: Overrides = None,
    stop_after: StopAfter = None,
    skip_rows: SkipRows = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what it would do and take; train nothing.")
    ] = False,
    tokens: Tokens = None,
    hardware_name: Annotated[
        str | None,
        typer.Option("--hardware", help=f"With --dry-run: one of {PRESET_NAMES}.", metavar="NAME"),
    ] = None,
) -> None:
    """Train, or continue where the last checkpoint left off.

    Sections of CONFIG: model, student, objective, task, masking, optimizer, train, evaluation,
    checkpoint, logging, card, slurm. `distil config keys SECTION` explains their keys.

    Example: distil pretrain configs/distilbert-base-uncased.yaml train.micro_batch_size=16
    """
    is_first = int(os.environ.get("RANK", 0)) == 0
    with end_on_signal():
        from launch.checks import places
        from launch.config import config_line, load_config
        from launch.torchrun.start import Launch
        from pretrain import RunError
        from pretrain.config import RunConfig, accumulation_steps
        from pretrain.plan import plan
        from pretrain.run_folder import check_hub, check_inputs, check_output

        processes = 1 if hardware_name is None else None  # else the preset's
        asked = Launch(config, overrides or [], gpus=processes, hardware=hardware_name)
        settings = load_config(RunConfig, config, [*asked.added, *asked.overrides])
        skipped = [parse_rows(text) for text in skip_rows or []]

        keep_going()
        # torch takes seconds to import: a mistake in the config or its paths is answered before.
        if is_first:
            show(config_line(config))
            check_output(settings)
            if dry_run:
                from launch.stages.estimate import run_lines

                check_inputs(settings, needs_shards=False)
                show(*run_lines(settings, asked, tokens=tokens))
                return
            if tokens is not None or hardware_name is not None:
                raise RunError("--tokens and --hardware are for --dry-run: add that")
            check_inputs(settings)
            accumulation_steps(settings, int(os.environ.get("WORLD_SIZE", 1)))
            found = plan(settings, {}, needs_shards=True)
            check_hub(settings)
            for finding in places(settings, found.disk):
                if finding.grade != "ok":
                    show(f"warning: {finding.what}: {finding.text}")
        from pretrain.train import train

        quiet()
    with Training(settings.output / RUN_LOG) as progress:
        outcome = train(settings, progress=progress, stop_after=stop_after, skip_rows=skipped)
        output, place = settings.output, f"step {outcome.step:,} of {outcome.num_steps:,}"
        lines = {
            "finished": [
                f"{output}: finished, {place}; next:",
                f"  distil evaluate {output} {settings.shards}",
                f"  distil export {output} DIR",
            ],
            "up to date": [f"{output}: up to date, {place}; nothing to do"],
            "stopped": [f"{output}: stopped at {place}; the same command continues"],
            "interrupted": [
                f"{output}: interrupted at {place}, checkpoint written; the same command continues"
            ],
        }
        if is_first:
            for line in lines[outcome.ended]:
                progress.say(line)
    if outcome.ended == "interrupted":
        raise typer.Exit(ExitCode.REQUEUE)
