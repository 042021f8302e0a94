"""The commands of training, and of what comes after it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

import typer

from data_prep.messages import warn
from launch.commands import Config, Overrides, quiet
from launch.console.output import keep_going
from launch.torchrun.hardware import PRESET_NAMES
from pretrain.signals import end_on_signal

StopAfter = Annotated[
    int | None, typer.Option(help="Stop after this step; the schedule stays.", min=1)
]
SkipRows = Annotated[
    list[str] | None,
    typer.Option(help="Leave out rows a to b-1 from now on; repeatable.", metavar="a:b"),
]


def pretrain(
    config: Config,
    overrides: Overrides = None,
    stop_after: StopAfter = None,
    skip_rows: SkipRows = None,
) -> None:
    """Train, or continue where the last checkpoint left off.

    Example: distil pretrain configs/distilbert-base-uncased.yaml train.micro_batch_size=16
    """
    with end_on_signal():
        from launch.config import config_line, load_config
        from pretrain.config import RunConfig

        settings = load_config(RunConfig, config, overrides or [])
        skipped = [_rows(text) for text in skip_rows or []]

        # torch takes seconds to import: a mistake in the config is answered before.
        from launch.console.progress import Training
        from launch.console.tables import show
        from pretrain.train import train

        keep_going()
        quiet()
        if int(os.environ.get("RANK", 0)) == 0:
            show([config_line(config)])
    with Training() as progress:
        outcome = train(settings, progress=progress, stop_after=stop_after, skip_rows=skipped)
    if int(os.environ.get("RANK", 0)) == 0:
        place = f"step {outcome.step:,} of {outcome.num_steps:,}"
        lines = {
            "finished": f"{settings.output}: finished, {place}; next: distil export "
            f"{settings.output} DIR",
            "up to date": f"{settings.output}: up to date, {place}; nothing to do",
            "stopped": f"{settings.output}: stopped at {place}; the same command continues",
            "interrupted": f"{settings.output}: interrupted at {place}, checkpoint written; the "
            "same command continues",
        }
        show([lines[outcome.ended]])
    if outcome.ended == "interrupted":
        raise typer.Exit(75)


def launch(
    config: Config,
    overrides: Overrides = None,
    nodes: Annotated[int, typer.Option(help="How many nodes.", min=1)] = 1,
    gpus: Annotated[
        int | None,
        typer.Option(help="Processes on each node; by default its GPUs.", min=1),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(help=f"One of {PRESET_NAMES}.", metavar="NAME"),
    ] = None,
    zero: Annotated[
        int | None, typer.Option(help="DeepSpeed's ZeRO stage, 1 or 2, in place of DDP.")
    ] = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="Submit it to Slurm.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the command, start nothing.")
    ] = False,
    node_rank: Annotated[
        int | None, typer.Option(help="This node's number, from 0; Slurm knows it.", min=0)
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(help="The first node; Slurm knows it.", metavar="HOST[:PORT]"),
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="Let nodes meet at a public address.")
    ] = False,
    timeout: Annotated[
        int | None,
        typer.Option(help="Seconds after which a silent process ends the run; 300.", min=1),
    ] = None,
    grace: Annotated[int, typer.Option(help="Seconds to save in after a signal.", min=1)] = 60,
    max_restarts: Annotated[int, typer.Option(help="Restarts after a crash.", min=0)] = 3,
    stop_after: StopAfter = None,
    skip_rows: SkipRows = None,
) -> None:
    """Train with several processes, on one node or many: shows the exact command and starts it.

    Example: distil launch configs/distilbert-base-uncased.yaml --hardware 8xv100-16gb
    """
    for text in skip_rows or []:
        _rows(text)

    with end_on_signal():
        from launch.config import load_config
        from pretrain.config import RunConfig

        load_config(RunConfig, config, overrides or [])  # a mistake is answered before torch

        from launch.torchrun.start import Launch, start

        if not dry_run:
            keep_going()
        code = start(
            Launch(
                config=config,
                overrides=overrides or [],
                nodes=nodes,
                gpus=gpus,
                hardware=hardware,
                zero=zero,
                slurm=slurm,
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
        )
    raise typer.Exit(code)


def evaluate(
    model: Annotated[Path, typer.Argument(help="A run, or a folder with a model.")],
    shards: Annotated[Path, typer.Argument(help="A folder of shards.")],
    teacher: Annotated[str | None, typer.Option(help="A folder or hub name.")] = None,
    rows: Annotated[int, typer.Option(help="Held-out rows.", min=1)] = 1024,
) -> None:
    """Masked accuracy on held-out rows, next to the best constant answer and the teacher.

    Example: distil evaluate runs/demo/student runs/demo/shards --teacher runs/demo/teacher-export
    """
    from launch.console.tables import show
    from pretrain.evaluate import evaluate_folder

    quiet()
    values = evaluate_folder(model, shards, teacher=teacher, rows=rows, warn=warn)
    show([f"{name:>18}  {value:,.4f}" for name, value in values.items()])


def replay(
    run: Annotated[Path, typer.Argument(help="The output folder of a run.")],
    step: Annotated[int, typer.Option(help="The step, as the log counts: the first is 1.")],
    world_size: Annotated[
        int | None, typer.Option(help="Lay the step out for this many processes.", min=1)
    ] = None,
    micro_batch_size: Annotated[int | None, typer.Option(help="Rows at a time.", min=1)] = None,
    rank: Annotated[int | None, typer.Option(help="Only what this process had.", min=0)] = None,
    rows: Annotated[int, typer.Option(help="How many rows to show.", min=0)] = 8,
    shards: Annotated[Path | None, typer.Option(help="Where the shards lie now.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="All rows, one JSON object a line.")
    ] = False,
) -> None:
    """Show the exact rows and masks of an optimizer step, under any number of processes.

    Example: distil replay runs/distilbert-base-uncased --step 1000 --world-size 4
    """
    from launch import answers
    from pretrain.replay import replay as step_of

    found = step_of(
        run,
        step,
        world_size=world_size,
        micro_batch_size=micro_batch_size,
        shards=shards,
        warn=warn,
    )
    if as_json:
        answers.json_lines(row.as_json(step) for row in found.rows(rank))
    else:
        answers.replayed(found, rank, rows)


def export(
    run: Annotated[Path, typer.Argument(help="The output folder of a run.")],
    folder: Annotated[Path, typer.Argument(help="Where to write the checkpoint.")],
    push: Annotated[
        str | None, typer.Option(help="Upload to this repository; the token is HF_TOKEN's.")
    ] = None,
) -> None:
    """Write a checkpoint that plain transformers loads, with tokenizer and model card.

    Example: distil export runs/distilbert-base-uncased exported/my-distilbert
    """
    # transformers imports DeepSpeed where it is installed, which then warns that there is no GPU.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    keep_going()

    from launch.console.tables import show
    from pretrain.export.export import check_repository, hub_token
    from pretrain.export.export import export as write
    from pretrain.export.export import push as upload

    quiet()
    token = ""
    if push is not None:
        check_repository(push)
        token = hub_token()
    exported = write(run, folder, warn, again=bool(push))
    show(
        [
            f"{folder}: {exported.architecture}, {exported.num_parameters:,} parameters, "
            f"{exported.num_bytes:,} bytes, from step {exported.step:,}",
            f"read back: logits differ by at most {exported.difference:.1e}",
        ]
    )
    if push is not None:
        show([upload(folder, push, token)])


def demo(
    output: Annotated[
        Path | None, typer.Option(help="Where everything is written.", show_default="runs/demo")
    ] = None,
    quick: Annotated[bool, typer.Option(help="A shortened run, to see that it works.")] = False,
) -> None:
    """Run the whole road on documentation that is installed here: nothing is downloaded.

    Example: distil demo
    """
    from launch.demo import demo as run

    keep_going()
    quiet()
    run(output or Path("runs/demo-quick" if quick else "runs/demo"), quick=quick)


def _rows(text: str) -> tuple[int, int]:
    """The a and b of "a:b"."""
    from pretrain import RunError

    found = re.fullmatch(r"([0-9]+):([0-9]+)", text)
    first, end = (int(found[1]), int(found[2])) if found else (0, 0)
    if first >= end:
        raise RunError(
            f"--skip-rows {text}: no range: a:b leaves out rows a to b-1, such as 100:200"
        )
    return first, end
