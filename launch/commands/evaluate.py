"""Implement `distil evaluate`: measure models on validation rows, or on pairs of sentences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from launch.commands import RecordFile
from pretrain.monitor.records import append_record, check_record, of_run, row


def evaluate(
    models: Annotated[
        list[str],
        typer.Argument(help="Runs or folders with a model; without --data shards come last."),
    ],
    data: Annotated[
        Path | None,
        typer.Option(
            help="Shards, or a table (CSV, TSV) with sentence1, sentence2 and score, or STS-B's "
            "own file."
        ),
    ] = None,
    teacher: Annotated[str | None, typer.Option(help="A folder or hub name.")] = None,
    rows: Annotated[
        int | None,
        typer.Option(
            help="Validation rows, by default 1024; of encoders documents, by default 512.", min=1
        ),
    ] = None,
    same_vocabulary: Annotated[
        bool,
        typer.Option(
            "--same-vocabulary",
            help="Accept tokenizers that are missing, or that treat case and accents differently.",
        ),
    ] = False,
    split: Annotated[
        Literal["train", "validation", "test"],
        typer.Option(help="Of the examples of a task: validation, or test."),
    ] = "validation",
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a model instead of the table.")
    ] = False,
    record: RecordFile = None,
) -> None:
    """Measure models on validation rows, examples or sentence pairs, next to their teacher.

    With a language-model head: masked accuracy, next to the best constant guess. Without one: how
    similar the vectors of student and teacher are, and their correlation with scores of pairs.
    On the examples of a task: accuracy, F1, correlations, and what is kept of the teacher's score.

    Example: distil evaluate runs/demo/student runs/demo/shards --teacher configs/demo-teacher
    """
    from data_prep.messages import warn
    from data_prep.shards import open_shards
    from launch.config import find_shipped
    from launch.console import show
    from launch.stages.evaluate import measure, row_names, show_figures
    from pretrain import RunError
    from pretrain.model.hub import look_up
    from pretrain.run_folder import check_model, check_source, teacher_of_runs

    say = warn if as_json else show
    if data is None:
        *models, last = models
        data = Path(last)
    if not models:
        raise RunError("distil evaluate MODEL SHARDS: give a model and shards, or --data")
    for model in models:
        is_path = model.count("/") != 1 or model.startswith((".", "/", "~"))  # else a hub's name
        if Path(model).exists() or is_path:
            check_model(Path(model))
    check_record(record)
    if not data.exists() and data.suffix in (".csv", ".tsv"):
        raise RunError(f"--data {data}: the file does not exist")
    if data.is_file() and rows is not None:
        raise RunError("--rows: is for shards; a file of pairs is read as a whole")
    if not data.is_file():
        open_shards(data, split)
    if teacher is not None:
        if teacher.startswith("shipped:"):
            teacher = str(find_shipped(Path(teacher)))
        check_source("teacher", teacher)
    else:
        teacher, same = teacher_of_runs(models)
        same_vocabulary |= same
        try:
            if teacher is not None:
                check_source("teacher", teacher)
        except RunError as error:
            say(f"without the runs' teacher: {error}")
            teacher = None

    # Last, because a hub that does not answer is waited for.
    for who, name in [("model", model) for model in models] + [("teacher", teacher or "")]:
        if name and not Path(name).exists():
            look_up(f"{who} {name}", name)

    # torch takes seconds to import: a wrong path is answered before.
    found, meanings = measure(models, data, teacher, same_vocabulary, rows, split, say)
    names = row_names(found)
    if as_json:
        for model, figures in found.items():
            values = {name: figure._asdict() for name, figure in figures.items()}
            print(json.dumps({"model": names[model], "figures": values}))
    else:
        show_figures({names[model]: figures for model, figures in found.items()}, meanings)
    append_record(record, data, (row(names[m], found[m], **of_run(Path(m))) for m in found))
