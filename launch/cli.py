"""`distil`: the command line. Heavy imports wait until a command needs them."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer

app = typer.Typer(
    name="distil",
    help="Make your own DistilBERT: corpus -> packed shards -> distillation -> checkpoint.",
    epilog="Any command takes --debug, which shows the traceback behind an error.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Config = Annotated[Path, typer.Argument(help="A YAML file.", metavar="CONFIG")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="section.key=value ...", metavar="[OVERRIDES]...")
]


@app.command()
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
    from launch.config import load_config

    if task is not None and stage is None:
        raise CorpusError("--task: needs --stage")
    if (stage is not None) + finalize + dry_run > 1:
        raise CorpusError("--stage, --finalize and --dry-run: use one of them")
    if upload == "":
        raise CorpusError("--upload: is empty: give a URL such as s3://bucket/folder")
    if (stage is not None or dry_run) and (parquet or upload):
        raise CorpusError(
            "--parquet and --upload: need finished shards: use them without --stage and --dry-run"
        )
    settings = load_config(CorpusConfig, config, overrides or [])
    runner = corpus.engine_named(engine)
    if dry_run:
        corpus.estimate_shown(settings)
    elif stage is not None:
        corpus.stage_shown(settings, stage, task, runner)
    elif finalize:
        corpus.finalise_shown(settings)
    else:
        corpus.prepare_shown(settings, runner)
    corpus.publish_shown(settings, parquet, upload)


@app.command()
def verify(folder: Annotated[Path, typer.Argument(help="A folder of shards.")]) -> None:
    """Check every file of a prepared corpus against its manifest.

    Example: distil verify shards/wikipedia-books
    """
    from data_prep import CorpusError
    from data_prep.shards import load_manifest
    from data_prep.shards import verify as problems_of
    from launch.tables import show

    problems = problems_of(folder)
    if problems:
        raise CorpusError("\n       ".join(problems))
    manifest = load_manifest(folder)
    shards = sum(len(split.shards) for split in manifest.splits.values())
    show([f"{folder}: {shards} shard(s) and {len(manifest.files)} other files are whole"])


@app.command()
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
    from launch import tables

    if leftovers:
        tables.leftovers(data.leftovers(folder))
    else:
        tables.inspection(data.summary(folder, rows))


@app.command()
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


@app.command()
def pretrain(
    config: Config,
    overrides: Overrides = None,
    stop_after: Annotated[
        int | None, typer.Option(help="Stop after this step; the schedule stays.", min=1)
    ] = None,
) -> None:
    """Train, or continue where the last checkpoint left off.

    Example: distil pretrain configs/distilbert-base-uncased.yaml train.micro_batch_size=16
    """
    from launch.config import load_config
    from launch.progress import Training
    from launch.tables import show
    from pretrain.config import RunConfig
    from pretrain.train import train

    _quiet()
    settings = load_config(RunConfig, config, overrides or [])
    with Training() as progress:
        outcome = train(settings, progress=progress, stop_after=stop_after)
    if int(os.environ.get("RANK", 0)) == 0:
        where = f"step {outcome.step:,} of {outcome.num_steps:,}"
        lines = {
            "finished": f"{settings.output}: finished, {where}; next: distil export "
            f"{settings.output} DIR",
            "up to date": f"{settings.output}: up to date, {where}; nothing to do",
            "stopped": f"{settings.output}: stopped at {where}; the same command continues",
            "interrupted": f"{settings.output}: interrupted at {where}, checkpoint written; the "
            "same command continues",
        }
        show([lines[outcome.ended]])
    if outcome.ended == "interrupted":
        raise typer.Exit(75)


@app.command()
def evaluate(
    model: Annotated[Path, typer.Argument(help="A run, or a folder with a model.")],
    shards: Annotated[Path, typer.Argument(help="A folder of shards.")],
    teacher: Annotated[str | None, typer.Option(help="A folder or hub name.")] = None,
    rows: Annotated[int, typer.Option(help="Held-out rows.", min=1)] = 1024,
) -> None:
    """Masked accuracy on held-out rows, beside the unigram baseline and the teacher.

    Example: distil evaluate runs/demo/student runs/demo/shards --teacher runs/demo/teacher-export
    """
    from launch.tables import show
    from pretrain.evaluate import evaluate_folder

    _quiet()
    values = evaluate_folder(model, shards, teacher=teacher, rows=rows, warn=_warn)
    show([f"{name:>18}  {value:,.4f}" for name, value in values.items()])


@app.command()
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
        warn=_warn,
    )
    if as_json:
        answers.json_lines(row.as_json(step) for row in found.rows(rank))
    else:
        answers.replayed(found, rank, rows)


@app.command()
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
    from launch.tables import show
    from pretrain.export import export as write
    from pretrain.export import hub_token
    from pretrain.export import push as upload

    _quiet()
    token = hub_token() if push else ""
    exported = write(run, folder, _warn)
    show(
        [
            f"{folder}: {exported.architecture}, {exported.num_parameters:,} parameters, "
            f"{exported.num_bytes:,} bytes, from step {exported.step:,}",
            f"read back: logits differ by at most {exported.difference:.1e}",
        ]
    )
    if push:
        show([upload(folder, push, token)])


@app.command()
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

    _quiet()
    run(output or Path("runs/demo-quick" if quick else "runs/demo"), quick=quick)


def main() -> None:
    """Entry point: the user's mistakes become one line and exit code 2, a non-finite loss 3."""
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    # Set before transformers and tokenizers are imported; a user's own setting wins.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        answer = _answer(error)
        if debug or answer is None:
            traceback.print_exc()
        if answer is None:
            sys.exit(1)
        text, code = answer
        print(f"error: {text}", file=sys.stderr)
        sys.exit(code)


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


def _quiet() -> None:
    """Keep transformers' own bars from running through ours."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def _answer(error: Exception) -> tuple[str, int] | None:
    """(message, exit code) for what is the user's to mend; None for a bug of ours."""
    from data_prep import CorpusError
    from launch.config import ConfigError
    from pretrain import NonFiniteError, RunError

    if isinstance(error, CorpusError | ConfigError | RunError):
        return str(error), 2
    if isinstance(error, NonFiniteError):
        return str(error), 3
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}{_remedy(error)}", 2
    return None


def _remedy(error: OSError) -> str:
    import errno

    remedies: dict[Any, str] = {
        errno.ENOSPC: "free some space, then run the same command again; what is finished stays",
        errno.EDQUOT: "free some space, then run the same command again; what is finished stays",
        errno.EROFS: "the disk is read-only; set `output:` to a place that can be written",
        errno.EACCES: "no permission; set `output:` to a place that can be written",
        errno.ENOTDIR: "a file stands where a folder should be; choose another path",
        errno.EEXIST: "a file stands where a folder should be; choose another path",
        errno.EFBIG: "a file-size limit was reached; raise it (ulimit -f) or write elsewhere",
    }
    return f"; {remedies[error.errno]}" if error.errno in remedies else ""


if __name__ == "__main__":
    main()
