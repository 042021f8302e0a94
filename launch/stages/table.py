"""List the stages that a recipe may name."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from data_prep.messages import duration
from launch.console import print_table, show
from launch.stages.estimate import Cost, cost_lines
from launch.stages.evaluate import Evaluate, Scores
from launch.stages.export import Export
from launch.stages.prepare import Examples, Prepare
from launch.stages.shrink import Prune, Trim
from launch.stages.stage import How, Stage, made_by, real
from launch.stages.sweep import Sweep
from launch.stages.train import Train
from launch.torchrun.nodes import Nodes
from pretrain import RunError
from pretrain.contracts.process import ExitCode, end_on_signal

# A new stage is a file with a subclass of `Stage`, and a line here. The first is the default.
STAGES: dict[str, type[Stage]] = {
    "train": Train,
    "prepare": Prepare,
    "examples": Examples,
    "trim": Trim,
    "prune": Prune,
    "evaluate": Evaluate,
    "scores": Scores,
    "export": Export,
    "sweep": Sweep,  # what `sweep:` of a training run becomes
}


def stage_of(entry: Any) -> Stage:
    """Return the stage of a recipe's entry, with the keys that are its own."""
    kind = STAGES[entry.stage]
    if kind.of is not None:
        values = {name: getattr(entry, name) for name in kind.of.model_fields}
        entry = kind.of.model_construct(entry.model_fields_set - {"stage"}, **values)
    return kind(entry)


def check_all(stages: Sequence[Stage], how: How, *, dry_run: bool) -> list[list[str]]:
    """Check all stages before the first one works for days; return their lines of `--dry-run`.

    Raises:
        RunError, CorpusError: of the first that cannot be made; names the key and the fix.
    """
    check_order(stages)
    made: dict[Path, Any] = {}  # inputs may be outputs of earlier stages
    lines = []
    for stage in stages:
        outputs, about = stage.check(made, how, dry_run=dry_run)
        lines.append(about)
        made |= outputs
    if how.tokens is not None and not any("assumed: " in line for about in lines for line in about):
        raise RunError("--tokens: all shards exist, or stages make them: leave it out")
    return lines


def make_all(
    stages: Sequence[Stage],
    how: How,
    lines: Sequence[Sequence[str]],
    *,
    dry_run: bool,
    nodes: Nodes | None = None,
) -> int:
    """Make stages one after the other; return the exit code of the first that does not end well.

    Args:
        stages: of a recipe.
        how: the options.
        lines: of `check_all`.
        dry_run: show the lines, and make nothing.
        nodes: several nodes, each of which calls this.
    """
    if not dry_run and len(stages) > 1:
        for number, stage in enumerate(stages, start=1):
            show(f"{number:>3}  {_place(stage)}: {stage.title}, {stage.state()}")
    code, took = int(ExitCode.DONE), list[str]()
    try:
        for number, stage in enumerate(stages, start=1):
            place = f"{_place(stage)}, {stage.title} ({stage.state()})"
            show("", f"run {number} of {len(stages)}: {place}")
            if dry_run:
                show(*lines[number - 1], *cost_lines([cost_of(stage)], how.launch, how.price))
                continue
            began = time.monotonic()
            # A stage continues after the last file that it wrote. While it trains, a signal saves.
            with end_on_signal("stopped; the same command continues"):
                if nodes is None or stage.everywhere:
                    code = stage.run(how)
                else:
                    code = nodes.first(f"run {number}", partial(stage.run, how))
            took.append(duration(time.monotonic() - began))
            if code != ExitCode.DONE:
                break
    finally:  # after an error, too
        if not dry_run and len(stages) > 1:
            _show_results(stages[:number], stages[number:], took)
    known = [stage for stage in stages if stage.flop]
    if dry_run and known:
        unknown = sum(stage.flop is None for stage in stages)
        without = f", without {unknown} stage(s) whose rows or models are not known" * (unknown > 0)
        others = len(stages) - len(known) - unknown
        without += f", without {others} stage(s) that do not train" * (others > 0)
        show(
            "",
            *(
                f"in all: {line}{without}"
                for line in cost_lines([*map(cost_of, known)], how.launch, how.price)
            ),
        )
    return code


def cost_of(stage: Stage) -> Cost:
    """Return what a stage takes, once `check` has estimated it."""
    return Cost(stage.flop, stage.disk, stage.least, stage.everywhere)


def _show_results(begun: Sequence[Stage], others: Sequence[Stage], took: Sequence[str]) -> None:
    """Print what came of each stage; one that has raised an error has no time."""
    rows = [
        [_place(stage), time_taken, stage.result()]
        for stage, time_taken in zip(begun, [*took, ""], strict=False)
    ]
    rows += [[_place(stage), "", "not begun"] for stage in others]
    show("")
    print_table(["run", "took", "result"], rows)


def _place(stage: Stage) -> str:
    first, *more = map(str, stage.outputs())
    return f"{first} and {len(more)} more" if len(more) > 2 else ", ".join([first, *more])


def check_order(stages: Sequence[Stage]) -> None:
    """Refuse a folder that a later stage makes, or that is not there and that no stage makes.

    Raises:
        RunError: names both stages, or the path.
    """
    outputs = [{real(output) for output in stage.outputs()} for stage in stages]
    for number, made in enumerate(outputs):
        for other in range(number):
            if both := made & outputs[other]:
                raise RunError(
                    f"runs {other + 1} and {number + 1} have the output {both.pop()}: each needs "
                    "its own"
                )
    folders = {output.parent for stage in stages for output in stage.outputs()} - {Path()}
    for number, stage in enumerate(stages):
        for key, name in stage.reads().items():
            place = made_by(name)
            if Path(name).exists() or any(place in made for made in outputs[:number]):
                continue
            what = f"run {number + 1} needs {key} {name}, which"
            makers = [i for i, made in enumerate(outputs) if place in made]
            if makers:
                raise RunError(f"{what} run {makers[0] + 1} makes: put that one first")
            # Beside the stages' outputs; another name may be a hub's.
            if Path(name).parent in folders and not key.startswith("shards"):
                raise RunError(f"{what} is not there and which no run makes; correct the path")
