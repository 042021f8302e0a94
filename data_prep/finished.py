"""What an output folder holds already: this corpus, another, a part of one, or nothing."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import ValidationError

from data_prep import CorpusError
from data_prep.config import TrainTokenizer
from data_prep.plan import Plan
from data_prep.shards import Manifest, load_manifest, verify
from data_prep.shards.manifest import MANIFEST
from data_prep.sources import name_of
from data_prep.stages.finish import PROVENANCE
from data_prep.tokens import load
from data_prep.work.units import Record, is_same


def find_finished(plan: Plan, warn: Callable[[str], None]) -> list[Manifest] | None:
    """The manifests of an output that already holds this corpus, None if there is work to do.

    CorpusError if the output holds another corpus. What is damaged is made again, with a warning.
    """
    config = plan.config
    manifests = []
    for row_length in config.row_lengths:
        folder = config.folder(row_length)
        if not (folder / MANIFEST).exists():
            return None
        manifest = load_manifest(folder)
        if differences := list(_differences(plan, folder, row_length, manifest)):
            raise CorpusError(
                f"{folder}: holds shards of another corpus ({'; '.join(differences)}): "
                "use another `output`"
            )
        if problems := verify(folder, full=True):
            warn(f"{problems[0].split(': ')[0]} is not whole: making it again")
            plan.work.mkdir(exist_ok=True)  # says that what lies here is ours
            (folder / MANIFEST).unlink()
            return None
        manifests.append(manifest)
    return manifests


def _differences(plan: Plan, folder: Path, row_length: int, manifest: Manifest) -> Iterator[str]:
    config = plan.config
    new, old = config.content(row_length), manifest.content
    for key in sorted(new.keys() | old.keys()):
        if new.get(key) != old.get(key):
            yield f"{key}: {_short(old.get(key))} there, {_short(new.get(key))} here"
    given = None if isinstance(config.tokenizer, TrainTokenizer) else load(config.tokenizer)
    if given and given.record() != manifest.tokenizer:
        yield "the tokenizer differs"
    labels = [(source.label, source.licence) for source in config.sources]
    if labels != [(source.name, source.licence) for source in manifest.sources]:
        yield "names or licences of sources differ"
    try:
        lines = (folder / PROVENANCE).read_bytes().splitlines()
        units = [Record.model_validate_json(line) for line in lines]
    except (OSError, ValidationError):
        return  # `verify` will find it
    read = [record for unit in units if unit.stage == "extract" for record in unit.inputs]
    here = [
        (number, name_of(config.sources[number], piece), piece)
        for number, of_source in enumerate(plan.pieces)
        for piece in of_source
    ]
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


_OURS = re.compile(
    r"\.work|segments|tokenizer|\d+|(train|validation)-\d+\.arrow|manifest\.json(\.tmp)?"
    r"|token_counts\.json|(provenance|quarantine|leftovers|contaminated)\.jsonl"
)


def open_work(plan: Plan) -> None:
    """Make the work folder; CorpusError if the output holds what is not ours."""
    output, work = plan.config.output, plan.work
    found = sorted(os.listdir(output)) if output.is_dir() else []
    if MANIFEST in found and isinstance(plan.config.row_length, tuple):
        raise CorpusError(f"{output}: holds shards of one row length: use another `output`")
    # Shards without a manifest are an interrupted run's if its work folder is there, too.
    begun = work.name in found or MANIFEST in found  # another process may just have finished
    foreign = [name for name in found if not begun or not _OURS.fullmatch(name)]
    if foreign:
        raise CorpusError(
            f"{output}: holds {foreign[0]} but no {MANIFEST}: use an empty or a new folder"
        )
    work.mkdir(parents=True, exist_ok=True)
