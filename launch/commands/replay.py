"""Implement `distil replay`: show the rows and masks of a step."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from launch.commands import Run

_MASKS = 6  # shown of a row, on its line
_LINE = "{:>8}  {:>4}  {:>11}  {:>5}  {:>9}  {:>6}  {}"


def replay(
    run: Run,
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
    # Imported here, so that `distil --help` does not wait for numpy and pydantic.
    from data_prep.messages import one_line, warn
    from launch.console import show
    from pretrain.replay import replay as replay_step

    found = replay_step(
        run,
        step,
        world_size=world_size,
        micro_batch_size=micro_batch_size,
        shards=shards,
        warn=warn,
    )
    replayed = found.rows(rank)
    if as_json:
        for row in replayed:
            print(json.dumps(row.as_json(step)))
        return

    num_rows = found.order.global_batch_size
    share = num_rows // found.world_size
    show(
        f"step {found.step} of {found.num_steps}, counted as in the log: {num_rows} "
        f"rows = {found.micro_batch_size} rows x {share // found.micro_batch_size} "
        f"micro-batch(es) x {found.world_size} process(es)",
        _LINE.format("position", "rank", "micro-batch", "epoch", "row", "masked", "masks"),
    )
    for row in islice(replayed, rows):
        masked, text = 0, "left out by --skip-rows"
        if not row.skipped:
            masked = len(row.labels)
            pairs = zip(row.labels.tolist(), row.shown.tolist(), strict=True)
            masks = [f"{found.token(a)} -> {found.token(b)}" for a, b in islice(pairs, _MASKS)]
            more = f", and {masked - len(masks)} more" if masked > len(masks) else ""
            text = ", ".join(map(one_line, masks)) + more
        place = (row.index, row.rank, row.micro_batch, row.epoch, row.row)
        show(_LINE.format(*place, masked, text))
    of = share if rank is not None else num_rows
    whose = "" if rank is None else f" of rank {rank}"
    show(
        f"{min(rows, of)} of {of} rows{whose} (--rows for more, --json for all and for whole "
        "rows); positions, ranks, micro-batches and epochs count from 0",
        f"what a row is made of: distil inspect {found.shards.folder} --row ROW",
    )
