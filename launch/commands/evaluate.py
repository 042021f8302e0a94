"""Implement `distil evaluate`: measure models on validation rows, or on pairs of sentences."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launch.commands import quiet

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pretrain.encoders import Figure


def evaluate(
    models: Annotated[
        list[str],
        typer.Argument(help="Runs or folders with a model; without --data shards come last."),
    ],
    data: Annotated[
        Path | None,
        typer.Option(help="Shards, or a table with the columns sentence1, sentence2 and score."),
    ] = None,
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
    """Measure models on validation rows or sentence pairs, next to their teacher.

    With a language-model head: masked accuracy, next to the best constant guess. Without one: how
    similar the vectors of student and teacher are, and their correlation with scores of pairs.

    Example: distil evaluate runs/demo/student runs/demo/shards --teacher runs/demo/teacher-export
    """
    from data_prep.messages import warn
    from data_prep.shards import open_shards
    from launch.console import print_table, show
    from pretrain import RunError
    from pretrain.monitor.figures import label
    from pretrain.output import check_model, check_source, is_run

    if data is None:
        *models, last = models
        data = Path(last)
    if not models:
        raise RunError("distil evaluate MODEL SHARDS: give a model and shards, or --data")
    for model in models:
        is_path = model.count("/") != 1 or model.startswith((".", "/", "~"))  # else a hub's name
        if Path(model).exists() or is_path:
            check_model(Path(model))
    if not data.is_file():
        open_shards(data, "validation")
    if teacher is not None:
        check_source("teacher", teacher)

    # torch takes seconds to import: a wrong path is answered before.
    from pretrain.encoders import evaluate_encoders, is_encoder, keep_figures
    from pretrain.evaluate import evaluate_folder

    quiet()
    if data.is_file() or is_encoder(models[0]):
        figures = evaluate_encoders(models, data, teacher, show)
        show_figures(figures)
        if len(models) == 1 and is_run(Path(models[0])):
            keep_figures(Path(models[0]), data, teacher, figures)
        return
    found = {
        model: evaluate_folder(
            Path(model),
            data,
            teacher=teacher,
            same_vocabulary=same_vocabulary,
            rows=rows,
            warn=warn,
        )
        for model in models
    }
    names = {name: label(name, of_head=True) for name in found[models[0]]}
    if len(models) > 1:
        print_table(
            ["", *models],
            [[text, *(f"{found[m][name]:,.4f}" for m in models)] for name, text in names.items()],
        )
        return
    show(*[f"{text:>20}  {found[models[0]][name]:,.4f}" for name, text in names.items()])


def show_figures(found: Mapping[str, Mapping[str, Figure]]) -> None:
    """Print a table of figures with their intervals, a model in each row."""
    from launch.console import print_table, show
    from pretrain.encoders import MEANINGS

    columns = dict.fromkeys(name for figures in found.values() for name in figures)
    cells = [
        [Path(model).name, *(str(figures.get(name, "")) for name in columns)]
        for model, figures in found.items()
    ]
    print_table(["", *columns], cells)
    show(*(f"{name}: {MEANINGS[name]}" for name in columns))
