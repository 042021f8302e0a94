"""Implement `distil doctor`: check a machine, the inputs of a run, and the way between nodes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launch.commands import HeadNode, NodeRank, NumNodes, Overrides
from launch.console import show
from pretrain.contracts.process import ExitCode

if TYPE_CHECKING:
    from launch.checks import Finding
    from launch.recipe_config import Recipe


def doctor(
    config: Annotated[
        Path | None, typer.Argument(help="A run or a recipe, whose inputs are checked, too.")
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
    """Check this machine: versions, GPU, precision, memory, disk, clock.

    With CONFIG the inputs of a run are loaded as it would load them, and the stages of a recipe
    checked as at its start. With --distributed processes sum as many numbers as a DistilBERT has
    gradients; with --nodes the same command runs on each.

    Example: distil doctor configs/demo.yaml
    """
    from launch.checks import findings
    from launch.config import kind_of, load_config
    from launch.recipe_config import Recipe
    from launch.torchrun.start import Launch, meeting_point
    from launch.torchrun.sums import measure
    from pretrain import RunError
    from pretrain.config import RunConfig

    if config is not None and (config / "config.json").is_file():
        config /= "config.json"  # the folder is a run's
    run, recipe = None, None
    if config is not None and kind_of(config, overrides or []) is Recipe:
        recipe = load_config(Recipe, config, overrides or [])
    elif config is not None:
        run = load_config(RunConfig, config, overrides or [])
    asked = Launch(config or Path(), [], nodes=nodes, gpus=gpus, node_rank=node_rank, head=head)
    if not distributed and (nodes, gpus, node_rank, head) != (1, None, None, None):
        raise RunError("--nodes, --gpus, --node-rank and --head are for --distributed: add that")
    if distributed and nodes > 1:
        meeting_point(asked)  # raises before the checks, which take seconds
    failed = 0
    about = [findings(run), check_recipe(recipe) if recipe is not None else ()]
    for found in chain(*about, measure(asked, timeout) if distributed else ()):
        show(f"{found.grade:<4}  {found.what}: {found.text}")
        failed += found.grade == "fail"
    if failed:
        show(f"{failed} check(s) failed")
        raise typer.Exit(ExitCode.MISTAKE)
    show("all is well")


def check_recipe(recipe: Recipe) -> Iterator[Finding]:
    """Check the stages of a recipe as at its start, and each teacher on shards that exist."""
    from data_prep.shards.manifest import MANIFEST
    from launch.checks import inputs, tried
    from launch.stages.stage import How
    from launch.stages.sweep import Sweep
    from launch.stages.table import check_all, stage_of
    from launch.stages.train import Train

    stages = [stage_of(entry) for entry in recipe.runs]
    check = partial(check_all, stages, How(), dry_run=False)
    yield tried("recipe", f"the inputs of its {len(stages)} stage(s) fit each other", check)
    runs = [run for stage in stages if isinstance(stage, Sweep) for run in stage.runs.values()]
    runs += [stage for stage in stages if isinstance(stage, Train)]
    seen = set()
    for run in (run.config for run in runs):
        pair = run.shards, run.teacher
        if (
            pair not in seen
            and (run.shards / MANIFEST).is_file()
            and Path(str(run.teacher)).exists()
        ):
            for found in inputs(run):
                if found.grade != "ok":
                    yield found._replace(what=f"{run.output}: {found.what}")
        seen.add(pair)
