"""Preparing a corpus as a person sees it: progress, then what it holds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from data_prep import CorpusError
from data_prep.config import CorpusConfig
from data_prep.estimate import estimate
from data_prep.messages import warn
from data_prep.pipeline.engines import Engine
from data_prep.pipeline.memory import return_large_blocks
from data_prep.prepare import STAGES, finalise, prepare, prepare_stage
from data_prep.publish import to_parquet, upload
from data_prep.shards import load_manifest
from data_prep.sources.remote import shown
from launch.console.output import keep_going
from launch.console.progress import stages
from launch.console.tables import corpus_lines, estimated, show


def prepare_shown(
    config: CorpusConfig, engine: Engine = "processes", accept_code: bool = False
) -> None:
    """Prepare, or find up to date, and say which."""
    keep_going()
    return_large_blocks()
    before = _is_finished(config)
    remade: list[str] = []
    with stages() as progress:

        def remember(text: str) -> None:
            remade.append(text)
            warn(text)

        prepare(config, progress, remember, engine=engine, accept_code=accept_code)
    kept = "kept, this code is accepted" if accept_code else "up to date"
    _show(config, kept if before and not remade else "done")


def stage_shown(config: CorpusConfig, stage: str, task: str | None, engine: Engine) -> None:
    """Run a part of one stage."""
    keep_going()
    return_large_blocks()
    chosen = next((name for name in STAGES if name == stage), None)
    if chosen is None:
        raise CorpusError(f"--stage {stage}: no such stage: one of {', '.join(STAGES)}")
    number, count = _task(task)
    with stages() as progress:
        done = prepare_stage(config, chosen, number, count, progress, warn, engine=engine)
    show([f"{stage} {number}/{count}: {done} unit(s) are done" if done else "nothing to do"])


def finalise_shown(config: CorpusConfig) -> None:
    """Put together what the stages made."""
    finalise(config, warn)
    _show(config, "done")


def estimate_shown(config: CorpusConfig) -> None:
    """What the corpus will be, from a sample."""
    estimated(estimate(config), config.workers)


def publish_shown(config: CorpusConfig, parquet: Path | None, url: str | None) -> None:
    """Write a folder for the hub and copy the shards elsewhere, for each row length."""
    several = len(config.row_lengths) > 1
    for row_length in config.row_lengths:
        folder = config.folder(row_length)
        if parquet is not None:
            place = parquet / str(row_length) if several else parquet
            with stages() as progress:
                state = to_parquet(folder, place, progress)
            show([f"{place}: {state}; to publish: hf upload USER/NAME {place} --repo-type dataset"])
        if url is not None:
            target = f"{url.rstrip('/')}/{row_length}" if several else url
            with stages() as progress:
                state = upload(folder, target, progress)
            show([f"{shown(target)}: {state}"])


def _task(task: str | None) -> tuple[int, int]:
    """Return the i and N of "i/N"."""
    found = re.fullmatch(r"([0-9]+)/([0-9]+)", "1/1" if task is None else task)
    number, count = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= number <= count:
        raise CorpusError(f"--task {task}: not a task: i/N with i from 1 to N, such as 3/16")
    return number, count


def engine_named(name: str) -> Engine:
    """Return the engine of that name."""
    if name not in get_args(Engine):
        raise CorpusError(f"--engine {name}: no such engine: {' or '.join(get_args(Engine))}")
    chosen: Engine = "ray" if name == "ray" else "processes"
    return chosen


def _is_finished(config: CorpusConfig) -> bool:
    folders = [config.folder(row_length) for row_length in config.row_lengths]
    return all((folder / "manifest.json").exists() for folder in folders)


def _show(config: CorpusConfig, state: str) -> None:
    for row_length in config.row_lengths:
        folder = config.folder(row_length)
        show(corpus_lines(folder, load_manifest(folder), state))
