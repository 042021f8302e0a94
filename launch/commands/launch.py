"""Implement `distil launch`: start several processes under a supervisor, or submit to Slurm."""

from __future__ import annotations

from typing import Annotated

import typer

from launch.commands import (
    COURSE,
    PLACE,
    PLAN,
    Config,
    HeadNode,
    NodeRank,
    NumNodes,
    Overrides,
    SkipRows,
    StopAfter,
    Tokens,
    parse_rows,
)
from launch.console import keep_going, show
from launch.torchrun.hardware import PRESET_NAMES
from pretrain.contracts.process import end_on_signal


def launch(
    config: Config,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Show what it would take, and the command.", rich_help_panel=PLAN
        ),
    ] = False,
    tokens: Tokens = None,
    nodes: NumNodes = 1,
    gpus: Annotated[
        int | None,
        typer.Option(
            help="Processes on each node; by default its GPUs.", min=1, rich_help_panel=PLACE
        ),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(help=f"One of {PRESET_NAMES}.", metavar="NAME", rich_help_panel=PLACE),
    ] = None,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="Submit it to Slurm.", rich_help_panel=PLACE)
    ] = False,
    show_script: Annotated[
        bool,
        typer.Option(
            "--print", help="With --slurm: only show the job's script.", rich_help_panel=PLACE
        ),
    ] = False,
    node_rank: NodeRank = None,
    head: HeadNode = None,
    public: Annotated[
        bool,
        typer.Option("--public", help="Let nodes meet at a public address.", rich_help_panel=PLACE),
    ] = False,
    zero: Annotated[
        int | None,
        typer.Option(
            help="DeepSpeed's ZeRO stage, 1 or 2, in place of DDP.", rich_help_panel=COURSE
        ),
    ] = None,
    timeout: Annotated[
        int | None,
        typer.Option(
            help="Seconds after which a silent process ends the run; 300.",
            min=1,
            rich_help_panel=COURSE,
        ),
    ] = None,
    grace: Annotated[
        int, typer.Option(help="Seconds to save in after a signal.", min=1, rich_help_panel=COURSE)
    ] = 60,
    max_restarts: Annotated[
        int, typer.Option(help="Restarts after a crash.", min=0, rich_help_panel=COURSE)
    ] = 3,
    stop_after: StopAfter = None,
    skip_rows: SkipRows = None,
) -> None:
    """Train with several processes, on one node or many: shows the exact command and starts it.

    CONFIG may be a recipe: its runs are trained like this, and the first node makes other stages.

    Example: distil launch configs/distilbert-base-uncased.yaml --hardware 8xv100-16gb
    """
    for text in skip_rows or []:
        parse_rows(text)
    with end_on_signal():
        from launch.config import kind_of, load_config
        from launch.recipe_config import Recipe
        from launch.torchrun.start import Launch, start
        from pretrain import RunError
        from pretrain.config import RunConfig

        if not dry_run:
            keep_going()
        asked = Launch(
            config=config,
            overrides=overrides or [],
            nodes=nodes,
            gpus=gpus,
            hardware=hardware,
            zero=zero,
            slurm=slurm,
            show_script=show_script,
            public=public,
            dry_run=dry_run,
            node_rank=node_rank,
            head=head,
            timeout=timeout,
            grace=grace,
            max_restarts=max_restarts,
            stop_after=stop_after,
            skip_rows=tuple(skip_rows or ()),
        )
        is_recipe = kind_of(config) is Recipe
        if tokens is not None and not dry_run:
            raise RunError("--tokens is for --dry-run: add that")
        if not is_recipe:
            if dry_run:
                from launch.stages.estimate import run_lines

                run = load_config(RunConfig, config, [*asked.added, *asked.overrides])
                about = run_lines(run, asked, tokens=tokens)
                show(*(f"# {line}" for line in about))
            raise typer.Exit(start(asked))
        from launch.stages.launched import check, make

        checked = check(asked, tokens)
    raise typer.Exit(make(asked, *checked))
