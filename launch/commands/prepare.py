"""Implement `distil prepare`: turn a corpus into packed shards."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from launch.commands import AcceptCode, Config, Overrides, RecordFile
from launch.console import counts, keep_going, show, stages
from pretrain.monitor.records import append_record, check_record, row

if TYPE_CHECKING:
    from data_prep.config import CorpusConfig
    from data_prep.estimate import Estimate
    from data_prep.examples.examples_config import ExamplesConfig
    from data_prep.pipeline.engines import Engine


def prepare(
    config: Config,
    overrides: Overrides = None,
    engine: Annotated[
        Literal["processes", "ray"], typer.Option(help="Who runs the units.")
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
    accept_code: AcceptCode = False,
    upload: Annotated[
        str | None, typer.Option(help="Also copy the shards to s3://, gs://, hf:// ...")
    ] = None,
    record: RecordFile = None,
) -> None:
    """Turn a corpus into packed shards, or a task's labelled data into shards of examples.

    Sections of CONFIG: sources, tokenizer, deduplicate, decontaminate; of a task's data: task,
    tokenizer. `distil config keys SECTION` explains their keys.

    Example: distil prepare configs/corpus-wikipedia-bookcorpus.yaml workers=8
    """
    from data_prep import CorpusError
    from data_prep.config import CorpusConfig
    from data_prep.examples.examples_config import ExamplesConfig
    from launch.config import config_line, kind_of, load_config

    # Options that contradict each other are refused before the config is read.
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
    if (stage is not None or dry_run) and (upload or record):
        raise CorpusError(
            "--upload and --record: need finished shards: use them without --stage and --dry-run"
        )
    check_record(record)
    if kind_of(config) is ExamplesConfig:
        if stage is not None or finalize or dry_run or accept_code or upload:
            raise CorpusError(f"{config}: a task's data takes no option but --record: leave it out")
        prepare_examples(load_config(ExamplesConfig, config, overrides or []), record)
        return
    settings = load_config(CorpusConfig, config, overrides or [])
    # A place that cannot be written to is refused before the corpus is made, which may take hours.
    if upload is not None:
        from data_prep.publish import check_url

        check_url(upload)
    if not dry_run:
        keep_going()
    show(config_line(config))

    from data_prep.messages import warn
    from launch.stages.prepare import prepare_and_show, show_shards

    if engine == "ray" and not dry_run and not os.environ.get("RAY_ADDRESS"):
        show(f"RAY_ADDRESS is not set: Ray takes {settings.workers} cores of this machine")
    if dry_run:
        from data_prep.estimate import estimate

        show_estimate(estimate(settings), settings.workers)
    elif stage is not None:
        prepare_one_stage(settings, stage, task, engine)
    elif finalize:
        from data_prep.prepare import finalise

        finalise(settings, warn)
        show_shards(settings, "done")
    else:
        prepare_and_show(settings, engine, accept_code)
        folder = settings.folder(settings.row_lengths[0])
        show("next:", f"  distil inspect {folder}", f"  distil pretrain RUN.yaml shards={folder}")
    for row_length in settings.row_lengths:
        if upload is not None:
            publish(settings, row_length, upload)
        if record is not None:
            folder = settings.folder(row_length)
            append_record(record, folder, [row(folder.name, counts_of(folder))])


def prepare_examples(config: ExamplesConfig, record: Path | None) -> None:
    """Make the shards of a task's data, or find them up to date."""
    from launch.stages.prepare import examples_and_show

    examples_and_show(config)
    append_record(record, config.output, [row(config.output.name, counts_of(config.output))])


def prepare_one_stage(config: CorpusConfig, stage: str, task: str | None, engine: Engine) -> None:
    """Run the part `task` (i/N) of one stage."""
    from data_prep import CorpusError
    from data_prep.messages import warn
    from data_prep.pipeline.plan import STAGES
    from data_prep.pipeline.processes import return_large_blocks
    from data_prep.prepare import prepare_stage

    return_large_blocks()
    known = next((name for name in STAGES if name == stage), None)
    if known is None:
        raise CorpusError(f"--stage {stage}: no such stage: one of {', '.join(STAGES)}")
    found = re.fullmatch(r"([0-9]+)/([0-9]+)", "1/1" if task is None else task)
    number, count = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= number <= count:
        raise CorpusError(f"--task {task}: not a task: i/N with i from 1 to N, such as 3/16")
    with stages() as progress:
        done = prepare_stage(config, known, number, count, progress, warn, engine=engine)
    show(f"{stage} {number}/{count}: {done} unit(s) are done" if done else "nothing to do")


def publish(config: CorpusConfig, row_length: int, url: str) -> None:
    """Copy finished shards of one row length to `url`."""
    from data_prep.messages import one_line
    from data_prep.publish import upload

    target = f"{url.rstrip('/')}/{row_length}" if len(config.row_lengths) > 1 else url
    with stages() as progress:
        state = upload(config.folder(row_length), target, progress)
    show(f"{one_line(target)}: {state}")


def counts_of(folder: Path) -> dict[str, float]:
    """Return what a record holds of finished shards."""
    from data_prep.shards import load_manifest

    manifest = load_manifest(folder)
    splits = manifest.splits.values()
    rows, tokens = sum(s.rows for s in splits), sum(s.tokens for s in splits)
    return {
        "documents": sum(source.documents_kept for source in manifest.sources),
        "tokens": tokens,
        "rows": rows,
        "row length": manifest.row_length,
        "full": tokens / max(1, rows * manifest.row_length),
    }


def show_estimate(estimate: Estimate, workers: int) -> None:
    """Print the figures of a dry run, by source and in total."""
    from rich.filesize import decimal

    from data_prep.messages import duration

    for source in estimate.sources:
        rows = ", ".join(
            f"{count:,} rows of {length} ({source.fill[length]:.1%} full)"
            for length, count in source.rows.items()
        )
        show(
            f"{source.name}: {decimal(source.stored_bytes)}, of which {source.share:.1%} sampled",
            f"  {source.documents:,} documents, {source.kept:,} kept"
            + counts("in the sample dropped", source.dropped),
            f"  {source.tokens:,} tokens, {source.tokens / max(source.words, 1):.2f} a word, "
            f"{source.unknown:.3%} unknown; {rows}",
        )
        if source.is_beginning:
            show("  sampled at the beginning of a compressed file: later documents may differ")
        if source.longest > sum(each.seconds for each in estimate.sources) / workers:
            show(
                f"  one file is one unit of about {duration(source.longest)}, for which other "
                "workers wait: more, smaller files, or a multistream dump, would not"
            )
    trained = " (trained on the sample)" if estimate.trained else ""
    show(
        f"in all {sum(s.tokens for s in estimate.sources):,} tokens of a vocabulary of "
        f"{estimate.vocab_size:,}{trained}; duplicates are not taken off",
        f"disk: {decimal(estimate.shard_bytes)} of shards, {decimal(estimate.work_bytes)} of "
        "work files until they are finished",
        f"time: about {duration(estimate.seconds)} with workers={workers}",
    )
