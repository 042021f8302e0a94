"""Make a recipe under `distil launch`: on one node, on several, or as a job of Slurm."""

from __future__ import annotations

from collections.abc import Sequence

from launch.config import config_line, load_config
from launch.console import show
from launch.recipe_config import Recipe
from launch.stages.stage import How, Stage
from launch.stages.table import check_all, make_all, stage_of
from launch.torchrun.nodes import Nodes
from launch.torchrun.start import (
    Launch,
    check_options,
    check_private,
    layout_of,
    meeting_point,
    submit,
)
from pretrain import RunError
from pretrain.contracts.process import ExitCode


def check(asked: Launch, tokens: float | None) -> tuple[Recipe, list[Stage], list[list[str]]]:
    """Return a recipe, its stages, and their lines of `--dry-run`.

    Raises:
        RunError, CorpusError: a mistake in the options, or of a stage; nothing was started.
    """
    check_options(asked)
    if asked.stop_after is not None or asked.skip_rows:
        raise RunError("--stop-after and --skip-rows are for one run, and this is a recipe")
    recipe = load_config(Recipe, asked.config, asked.overrides)
    stages = [stage_of(entry) for entry in recipe.runs]
    # The lines of `slurm.setup` may bring shards to each node.
    later = asked.show_script or bool(asked.slurm and recipe.slurm.setup)
    lines = check_all(stages, How(asked, tokens=tokens), dry_run=asked.dry_run or later)
    if not asked.show_script:
        show(config_line(asked.config))
    return recipe, stages, lines


def make(
    asked: Launch, recipe: Recipe, stages: Sequence[Stage], lines: Sequence[Sequence[str]]
) -> int:
    """Make the stages, or submit the same command to Slurm; return the exit code."""
    preset = check_options(asked)
    how = How(asked, price=recipe.price_per_hour)
    if asked.slurm or asked.dry_run:
        if not asked.show_script:
            make_all(stages, how, lines, dry_run=True)
        layout = layout_of(asked, preset, 0)
        return (
            submit(asked, layout, asked.overrides, recipe.slurm) if asked.slurm else ExitCode.DONE
        )
    if asked.nodes == 1:
        return make_all(stages, how, lines, dry_run=False)
    head, (rank,) = meeting_point(asked)
    if not asked.public:
        check_private(head, here=rank == 0)
    from pretrain.distributed.processes import timeout

    show(f"waiting for all {asked.nodes} nodes")
    nodes = Nodes(head, rank, asked.nodes, asked.timeout or timeout())
    try:
        return make_all(stages, how, lines, dry_run=False, nodes=nodes)
    finally:
        nodes.leave()
