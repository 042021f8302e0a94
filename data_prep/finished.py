"""What an output folder holds already: this corpus, another, a part of one, or nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

from pydantic import ValidationError

from data_prep import CorpusError
from data_prep.plan import Plan
from data_prep.shards import Manifest, load_manifest, verify
from data_prep.shards.manifest import MANIFEST
from data_prep.stages.finish import OURS, PROVENANCE
from data_prep.work.units import Record, is_same


def find_finished(plan: Plan, warn: Callable[[str], None]) -> list[Manifest] | None:
    """The manifests of an output that already holds this corpus, None if there is work to do.

    CorpusError if it holds another corpus, wholly or in part. What is damaged is to be made again:
    `warn` says so. Nothing is changed.
    """
    config = plan.config
    whole = []
    for row_length in config.row_lengths:
        folder = config.folder(row_length)
        if not (folder / MANIFEST).exists():
            continue
        manifest = load_manifest(folder)
        if differences := list(_differences(plan, folder, row_length, manifest)):
            raise CorpusError(
                f"{folder}: holds shards of another corpus ({'; '.join(differences)}): "
                "use another `output`"
            )
        if problems := verify(folder, full=True):
            warn(f"{problems[0].split(': ')[0]} is not whole: making it again")
        else:
            whole.append(manifest)
    return whole if len(whole) == len(config.row_lengths) else None


def _differences(plan: Plan, folder: Path, row_length: int, manifest: Manifest) -> Iterator[str]:
    config = plan.config
    new, old = config.content(row_length), manifest.content
    for key in sorted(new.keys() | old.keys()):
        if new.get(key) != old.get(key):
            yield f"{key}: {_short(old.get(key))} there, {_short(new.get(key))} here"
    if plan.tokenizer is not None and plan.tokenizer != manifest.tokenizer:
        yield "the tokenizer differs"
    labels = [(source.label, source.licence) for source in config.sources]
    if labels != [(source.name, source.licence) for source in manifest.sources]:
        yield "names or licences of sources differ"
    try:
        lines = (folder / PROVENANCE).read_bytes().splitlines()
        units = [Record.model_validate_json(line) for line in lines]
    except (OSError, ValidationError):
        return  # `verify` will find it
    stages = ("examples", "extract")
    read = [record for unit in units if unit.stage in stages for record in unit.inputs]
    here = [*plan.examples, *chain.from_iterable(plan.pieces)]
    if len(read) != len(here):
        yield f"{len(read)} pieces of input there, {len(here)} here"
        return
    for record, (number, name, piece) in zip(read, here, strict=True):
        named = (record.source, record.input) == (number, name)
        if not named or not is_same(piece, record):
            yield f"input {name} has changed"
            return


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


def open_work(plan: Plan) -> None:
    """Make the work folder; CorpusError if the output holds what is not ours."""
    config, output = plan.config, plan.config.output
    folders = [output, *(config.folder(length) for length in config.row_lengths)]
    lengths = {folder.name for folder in folders if folder != output}
    if lengths and (output / MANIFEST).exists():
        raise CorpusError(f"{output}: holds shards of one row length: use another `output`")
    # Shards without a manifest are an interrupted run's if its work folder is there, too.
    begun = plan.work.exists() or any((folder / MANIFEST).exists() for folder in folders)
    for folder in dict.fromkeys(folders):
        for name in sorted(os.listdir(folder)) if folder.is_dir() else ():
            ours = OURS.fullmatch(name) or (folder == output and name in lengths)
            if not (begun and ours) and not name.startswith("."):
                raise CorpusError(
                    f"{folder}: holds {name}, no part of an unfinished corpus: use an empty or a "
                    "new folder"
                )
    plan.work.mkdir(parents=True, exist_ok=True)
