"""Implement `distil doctor`: check a machine, the inputs of a run, and the way between nodes."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from launch.commands import HeadNode, NodeRank, NumNodes, Overrides
from launch.console import show
from pretrain.contracts.process import ExitCode


def doctor(
    config: Annotated[
        Path | None, typer.Argument(help="A run, whose inputs are checked, too.")
    ] = None,
    overrides: Overrides = None,
    distributed: Annotated[
        bool, typer.Option("--distributed", help="Also time sums over processes and nodes.")
    ] = False,
    nodes: NumNodes = 1,
    gpus: Annotated[
        int | None, typer.Option(help="Processes on each node; by default its GPUs, or 2.", min=1)
    ] = None,
    node_rank: NodeRank = None,
    head: HeadNode = None,
    timeout: Annotated[
        int, typer.Option(help="Seconds to wait for the other processes.", min=1)
    ] = 60,
) -> None:
    """Check this machine: versions, GPU, precision, memory, disk.

    With CONFIG the inputs of a run are loaded as it would load them; of a recipe `distil recipe
    FILE --dry-run` checks them. With --distributed processes sum as many numbers as a DistilBERT
    has gradients; with --nodes the same command runs on each.

    Example: distil doctor configs/demo.yaml
    """
    from launch.checks import findings
    from launch.config import load_config
    from launch.torchrun.start import Launch, meeting_point
    from launch.torchrun.sums import measure
    from pretrain import RunError
    from pretrain.config import RunConfig

    if config is not None and (config / "config.json").is_file():
        config /= "config.json"  # the folder is a run's
    run = None if config is None else load_config(RunConfig, config, overrides or [])
    asked = Launch(config or Path(), [], nodes=nodes, gpus=gpus, node_rank=node_rank, head=head)
    if not distributed and (nodes, gpus, node_rank, head) != (1, None, None, None):
        raise RunError("--nodes, --gpus, --node-rank and --head are for --distributed: add that")
    if distributed and nodes > 1:
        meeting_point(asked)  # raises before the checks, which take seconds
    failed = 0
    for found in chain(findings(run), measure(asked, timeout) if distributed else ()):
        show(f"{found.grade:<4}  {found.what}: {found.text}")
        failed += found.grade == "fail"
    if failed:
        show(f"{failed} check(s) failed")
        raise typer.Exit(ExitCode.MISTAKE)
    show("all is well")
