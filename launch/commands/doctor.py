"""Implement `distil doctor`: check a machine, the inputs of a run, and the way between nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from launch.commands import Overrides
from launch.console import show
from pretrain.exit_codes import ExitCode


def doctor(
    config: Annotated[
        Path | None, typer.Argument(help="A run's YAML file, whose inputs are checked, too.")
    ] = None,
    overrides: Overrides = None,
    distributed: Annotated[
        bool, typer.Option("--distributed", help="Also time sums over processes and nodes.")
    ] = False,
    nodes: Annotated[int, typer.Option(help="How many nodes.", min=1)] = 1,
    gpus: Annotated[
        int | None, typer.Option(help="Processes on each node; by default its GPUs, or 2.", min=1)
    ] = None,
    node_rank: Annotated[
        int | None, typer.Option(help="This node's number, from 0; Slurm knows it.", min=0)
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(help="The first node; Slurm knows it.", metavar="HOST[:PORT]"),
    ] = None,
    timeout: Annotated[
        int, typer.Option(help="Seconds to wait for the other processes.", min=1)
    ] = 60,
) -> None:
    """Check this machine: versions, GPU, precision, compilers, memory, disk, clock.

    With CONFIG the inputs of a run are loaded as it would load them. With --distributed processes
    sum as many numbers as BERT-base has gradients; with --nodes the same command runs on each.

    Example: distil doctor configs/demo.yaml
    """
    from launch.checks import Finding, findings
    from launch.config import load_config
    from launch.torchrun.start import Launch, meeting_point
    from pretrain import RunError
    from pretrain.config import RunConfig

    run = load_config(RunConfig, config, overrides or []) if config is not None else None
    asked = Launch(config or Path(), [], nodes=nodes, gpus=gpus, node_rank=node_rank, head=head)
    if not distributed and (nodes, gpus, node_rank, head) != (1, None, None, None):
        raise RunError("--nodes, --gpus, --node-rank and --head are for --distributed: add that")
    if distributed and nodes > 1:
        meeting_point(asked)  # raises before the checks, which take seconds
    failed = 0

    def say(found: Finding) -> None:
        show(f"{found.grade:<4}  {found.what}: {found.text}")

    for found in findings(run):
        say(found)
        failed += found.grade == "fail"
    if distributed:
        from launch.torchrun.sums import measure

        for found in measure(asked, timeout):
            say(found)
            failed += found.grade == "fail"
    if failed:
        show(f"{failed} check(s) failed")
        raise typer.Exit(ExitCode.MISTAKE)
    show("all is well")
