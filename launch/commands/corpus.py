"""The commands of the corpus stage."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from launch.commands import Config, Overrides
from launch.console.output import keep_going


def prepare(
    config: Config,
    overrides: Overrides = None,
    engine: Annotated[
        str, typer.Option(help="Who runs the units: processes, or ray.", metavar="NAME")
    ] = "processes",
    stage: Annotated[
        str | None, typer.Option(help="Run one stage only, for job arrays.", metavar="NAME")
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="Which part of the stage, from 1/N to N/N.", metavar="i/N")
    ] = None,
    finalize: Annotated[
        bool, typer.Option("--finalize", help="Put together what the stages made.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Estimate tokens, rows, disk and time from a sample.")
    ] = False,
    accept_code: Annotated[
        bool,
        typer.Option(
            "--accept-code",
            help="Keep finished shards that other code of the same behaviour made, and record it.",
        ),
    ] = False,
    parquet: Annotated[
        Path | None, typer.Option(help="Also write a folder for the hub, with a card.")
    ] = None,
    upload: Annotated[
        str | None, typer.Option(help="Also copy the shards to s3://, gs://, hf:// ...")
    ] = None,
) -> None:
    """Turn a corpus into packed shards.

    Example: distil prepare configs/corpus-wikipedia-bookcorpus.yaml workers=8
    """
    from data_prep import CorpusError
    from data_prep.config import CorpusConfig
    from launch import corpus
    from launch.config import config_line, load_config
    from launch.console.tables import show

    if task is not None and stage is None:
        raise CorpusError("--task: needs --stage")
    if (stage is not None) + finalize + dry_run > 1:
        raise CorpusError("--stage, --finalize and --dry-run: use one of them")
    if accept_code and (stage is not None or finalize or dry_run):
        raise CorpusError(
            "--accept-code: keeps finished shards: use it without --stage, --finalize and --dry-run"
        )
    if upload == "":
        raise CorpusError("--upload: is empty: give a URL such as s3://bucket/folder")
    if (stage is not None or dry_run) and (parquet or upload):
        raise CorpusError(
            "--parquet and --upload: need finished shards: use them without --stage and --dry-run"
        )
    settings = load_config(CorpusConfig, config, overrides or [])
    if not dry_run:
        keep_going()
    show([config_line(config)])
    runner = corpus.engine_named(engine)
    if dry_run:
        corpus.estimate_shown(settings)
    elif stage is not None:
        corpus.stage_shown(settings, stage, task, runner)
    elif finalize:
        corpus.finalise_shown(settings)
    else:
        corpus.prepare_shown(settings, runner, accept_code)
    corpus.publish_shown(settings, parquet, upload)


def verify(folder: Annotated[Path, typer.Argument(help="A folder of shards.")]) -> None:
    """Check every file of a prepared corpus against its manifest.

    Example: distil verify shards/wikipedia-books
    """
    from data_prep import CorpusError
    from data_prep.shards import load_manifest
    from data_prep.shards import verify as problems_of
    from launch.console.tables import show

    problems = problems_of(folder)
    if problems:
        raise CorpusError("\n       ".join(problems))
    manifest = load_manifest(folder)
    shards = sum(len(split.shards) for split in manifest.splits.values())
    show([f"{folder}: {shards} shard(s) and {len(manifest.files)} other files are whole"])


def inspect(
    folder: Annotated[Path, typer.Argument(help="A folder of shards.")],
    rows: Annotated[int, typer.Option(help="How many rows to decode.", min=0)] = 3,
    leftovers: Annotated[
        bool, typer.Option("--leftovers", help="Count the markup that cleaning left in the text.")
    ] = False,
) -> None:
    """Show counts, fill, unknown words and a few decoded rows.

    Example: distil inspect shards/wikipedia-books --rows 5
    """
    from data_prep import inspect as data
    from launch.console import tables

    if leftovers:
        tables.leftovers(data.leftovers(folder))
    else:
        tables.inspection(data.summary(folder, rows))


def audit(
    folder: Annotated[Path, typer.Argument(help="A folder of shards.")],
    row: Annotated[int | None, typer.Option(help="Name the documents in this row.", min=0)] = None,
    document: Annotated[
        str | None, typer.Option(help="List the rows that hold this id, URL or title.")
    ] = None,
    split: Annotated[str, typer.Option(help="Of --row: train or validation.")] = "train",
    source: Annotated[str | None, typer.Option(help="Of --document: only this source.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Name the documents in a row, or every row that holds a document.

    Example: distil audit shards/wikipedia-books --row 4711
    """
    from data_prep import CorpusError
    from data_prep.audit import documents_of_row, rows_of_document
    from data_prep.shards.reading import Split
    from launch import answers

    if (row is None) == (document is None):
        raise CorpusError("audit: give either --row NUMBER or --document ID")
    if row is not None:
        if split not in get_args(Split):
            raise CorpusError(f"--split {split}: there are {' and '.join(get_args(Split))}")
        segments = documents_of_row(folder, row, cast(Split, split))
        if as_json:
            answers.segment_lines(folder, row, split, segments)
        else:
            answers.row_documents(row, split, segments)
    elif document is not None:
        found = rows_of_document(folder, document, source)
        if as_json:
            answers.place_lines(folder, found)
        else:
            answers.document_rows(document, found)
