"""Implement `distil evaluate`: measure a model on validation rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from launch.commands import Shards, quiet


def evaluate(
    model: Annotated[Path, typer.Argument(help="A run, or a folder with a model.")],
    shards: Shards,
    teacher: Annotated[str | None, typer.Option(help="A folder or hub name.")] = None,
    rows: Annotated[int, typer.Option(help="Validation rows.", min=1)] = 1024,
    same_vocabulary: Annotated[
        bool,
        typer.Option(
            "--same-vocabulary",
            help="Accept tokenizers that are missing, or that treat case and accents differently.",
        ),
    ] = False,
) -> None:
    """Measure masked accuracy on validation rows, next to the best constant guess and the teacher.

    Example: distil evaluate runs/demo/student runs/demo/shards --teacher runs/demo/teacher-export
    """
    from data_prep.messages import warn
    from data_prep.shards import open_shards
    from launch.console import show
    from pretrain.monitor.labels import label
    from pretrain.output import check_model, check_source

    check_model(model)
    open_shards(shards, "validation")
    if teacher is not None:
        check_source("teacher", teacher)

    # torch takes seconds to import: a wrong path is answered before.
    from pretrain.evaluate import evaluate_folder

    quiet()
    values = evaluate_folder(
        model, shards, teacher=teacher, same_vocabulary=same_vocabulary, rows=rows, warn=warn
    )
    show(*[f"{label(name, of_head=True):>20}  {value:,.4f}" for name, value in values.items()])
