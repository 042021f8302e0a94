"""Implement `distil evaluate`: measure models on validation rows, or on pairs of sentences."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launch.commands import RecordFile, quiet
from pretrain.monitor.records import append_record, check_record, of_run, row

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pretrain.monitor.figures import Figure

OF_HEADS = {
    "accuracy": "share of the masked tokens that a model guesses; guessing: the most frequent one",
    "agreement": "share of them where a model and the teacher guess the same",
    "loss": "masked cross-entropy in nats; guessing: from the tokens' frequencies",
    "kl": "divergence of a model from the teacher at masked tokens, in nats",
}


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
    record: RecordFile = None,
) -> None:
    """Measure models on validation rows or sentence pairs, next to their teacher.

    With a language-model head: masked accuracy, next to the best constant guess. Without one: how
    similar the vectors of student and teacher are, and their correlation with scores of pairs.

    Example: distil evaluate runs/demo/student runs/demo/shards --teacher configs/demo-teacher
    """
    from data_prep.shards import open_shards
    from launch.config import find_shipped
    from launch.console import show
    from pretrain import RunError
    from pretrain.run_folder import check_model, check_source, teacher_of_runs

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
        open_shards(data, "validation")
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
            show(f"without the runs' teacher: {error}")
            teacher = None

    # torch takes seconds to import: a wrong path is answered before.
    found, meanings = measure(models, data, teacher, same_vocabulary, rows)
    names = row_names(found)
    show_figures({names[model]: figures for model, figures in found.items()}, meanings)
    append_record(record, data, (row(names[m], found[m], **of_run(Path(m))) for m in found))


def measure(
    models: Sequence[str], data: Path, teacher: str | None, same_vocabulary: bool, rows: int | None
) -> tuple[Mapping[str, Mapping[str, Figure]], Mapping[str, str]]:
    """Return the figures of each model, and what each figure means.

    Vectors are what models with and without an LM head have in common.
    """
    from data_prep.messages import warn
    from launch.console import show
    from pretrain import encoders
    from pretrain.evaluate import evaluate_folders
    from pretrain.run_folder import is_run

    quiet()
    if data.is_file() or any(encoders.is_encoder(model) for model in models):
        found = encoders.evaluate_encoders(
            models,
            data,
            teacher,
            show,
            same_vocabulary=same_vocabulary,
            documents=rows or encoders.DOCUMENTS,
        )
        if len(models) == 1 and is_run(Path(models[0])):
            encoders.keep_figures(Path(models[0]), data, teacher, found)
        return found, encoders.MEANINGS
    options: dict[str, Any] = {"teacher": teacher, "same_vocabulary": same_vocabulary}
    measured = evaluate_folders(models, data, rows=rows or 1024, warn=warn, **options)
    show(f"{measured[models[0]]['masked_tokens']:,.0f} masked tokens of {data}")
    return of_heads(measured, teacher), OF_HEADS


def row_names(models: Iterable[str]) -> dict[str, str]:
    """Return the last part of each path, whole paths if two share it.

    The student in a checkpoint is named by its run and step.
    """
    from pretrain.run_folder import checkpoint_of

    names = {model: Path(model).name for model in models}
    for model in names:
        if (checkpoint := checkpoint_of(Path(model))) is not None:
            names[model] = f"{checkpoint.parents[1].name}, {checkpoint.name}"
    return names if len(set(names.values())) == len(names) else {model: model for model in names}


def of_heads(
    found: Mapping[str, Mapping[str, float]], teacher: str | None
) -> dict[str, dict[str, Figure]]:
    """Return the figures of language-model heads, with rows for the teacher and for guessing."""
    from pretrain.monitor.figures import Figure, share

    first = next(iter(found.values()))
    count = first["masked_tokens"]

    def figures(values: Mapping[str, float]) -> dict[str, Figure]:
        shares = {"accuracy", "agreement"} & set(values)
        return {
            name: share(values[name], count) if name in shares else Figure(values[name])
            for name in OF_HEADS
            if name in values
        }

    rows: dict[str, dict[str, Figure]] = {}
    if teacher is not None:
        known = {"accuracy": first["teacher_accuracy"], "loss": first["teacher_loss"]}
        rows[teacher] = figures(known)
    rows |= {name: figures(values) for name, values in found.items()}
    guess = {"accuracy": first["constant_accuracy"], "loss": first["unigram_loss"]}
    return rows | {"guessing": figures(guess)}


def show_figures(found: Mapping[str, Mapping[str, Figure]], meanings: Mapping[str, str]) -> None:
    """Print a table of figures with their intervals, a model in each row, and what they mean."""
    from launch.console import print_table, show
    from pretrain.evaluate import UNTRAINED

    columns = dict.fromkeys(name for figures in found.values() for name in figures)
    cells = [
        [model, *(str(figures.get(name, "")) for name in columns)]
        for model, figures in found.items()
    ]
    print_table(["", *columns], cells)
    show(*(f"{name}: {meanings[name]}" for name in columns))
    if UNTRAINED in found:
        show(f"{UNTRAINED}: the student before its first step, with the teacher's weights")
