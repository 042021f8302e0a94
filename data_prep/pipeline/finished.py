"""Find out whether an output folder holds this corpus, another one, a part of one, or nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from data_prep import CorpusError
from data_prep.config import CorpusConfig
from data_prep.disk.json_files import read_regular, write_json
from data_prep.messages import one_line
from data_prep.pipeline.code import Code, installed
from data_prep.pipeline.plan import Plan
from data_prep.pipeline.stages.examples import evaluation_files
from data_prep.pipeline.stages.finish import ACCEPTED, CODE, OURS, PROVENANCE
from data_prep.pipeline.units import InputRecord, is_same
from data_prep.shards import Manifest, load_manifest, verify
from data_prep.shards.manifest import MANIFEST
from data_prep.sources.remote import looked_up_once

_ACCEPTED = TypeAdapter(list[Code])


def find_finished(
    plan: Plan, warn: Callable[[str], None], accept_code: bool = False
) -> list[Manifest] | None:
    """Return the manifests of an output that already holds this corpus; else None.

    CorpusError if it holds another corpus, wholly or in part, or if different code made it, unless
    `accept_code` (which is recorded) and the behaviour is the same. What is damaged is to be made
    again: `warn` says so. Nothing else is changed.
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
        _compare_code(plan.code["finish"], folder, manifest, accept_code)
        if problems := verify(folder, full=True):
            warn(f"{problems[0].split(': ')[0]} is not whole: making it again")
        else:
            whole.append(manifest)
    return whole if len(whole) == len(config.row_lengths) else None


def _differences(plan: Plan, folder: Path, row_length: int, manifest: Manifest) -> Iterator[str]:
    """Yield what the config, the tokenizer or the inputs have other than the shards' manifest."""
    config = plan.config
    new, old = config.content(row_length), manifest.content
    for key in sorted(new.keys() | old.keys()):
        if new.get(key) != old.get(key):
            shown = [one_line(json.dumps(values.get(key)), 80) for values in (old, new)]
            yield f"{key}: {shown[0]} there, {shown[1]} here"
    if plan.tokenizer is not None and plan.tokenizer != manifest.tokenizer:
        yield "the tokenizer differs"
    labels = [(source.label, source.licence) for source in config.sources]
    if labels != [(source.name, source.licence) for source in manifest.sources]:
        yield "names or licences of sources differ"
    try:
        units = map(json.loads, read_regular(folder / PROVENANCE).splitlines())
        # Only the inputs: other fields depend on the release that wrote them.
        read = [InputRecord.model_validate(values) for unit in units for values in unit["inputs"]]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return  # `verify` will find it
    here = [*evaluation_files(config), *chain.from_iterable(plan.pieces)]
    for number, name, piece in here[:]:
        if not piece.is_listed:
            parts = [record for record in read if record.source == number]
            if not parts or any(record.version != piece.version() for record in parts):
                yield f"input {name} has changed"
            read = [record for record in read if record.source != number]
            here.remove((number, name, piece))
    if len(read) != len(here):
        yield f"{len(read)} pieces of input there, {len(here)} here"
        return
    with looked_up_once():
        for record, (number, name, piece) in zip(read, here, strict=True):
            same = (record.source, record.input) == (number, name)
            if not same or not is_same(piece, record, with_others=True):
                yield f"input {name} has changed"
                return  # to compare all may take hours


def _compare_code(here: Code, folder: Path, manifest: Manifest, accept: bool) -> None:
    """Raise CorpusError if the shards were made by code that is neither `here` nor accepted."""
    there = None
    try:
        if CODE in [file.file for file in manifest.files]:
            there = Code.model_validate_json(read_regular(folder / CODE))
    except (OSError, ValidationError):
        return  # `verify` will find it
    try:
        accepted = _ACCEPTED.validate_json(read_regular(folder / ACCEPTED))
    except (OSError, ValidationError):
        accepted = []
    # Without evaluation files that stage has made nothing.
    unused = set() if manifest.content.get("decontaminate") else {"examples"}
    if there is not None and any(
        there.behaviour.get(stage) != number
        for stage, number in here.behaviour.items()
        if stage not in unused
    ):
        raise CorpusError(
            f"{folder}: made by code of another behaviour ({there.differences(here)}): "
            "use another `output`"
        )
    if here in (there, *accepted):
        return
    if accept:
        values = [code.model_dump() for code in (*accepted, here)]
        write_json(folder / ACCEPTED, values)
        return
    versions = (
        f"distil-pretraining {manifest.code_version} there, {installed('distil-pretraining')} here"
    )
    if there is None:
        difference = "by a release that did not record its code"
    else:
        difference = f"by different code of the same behaviour: {there.differences(here)}"
    raise CorpusError(
        f"{folder}: made {difference} ({versions}): keep the shards with `distil prepare CONFIG "
        "--accept-code`, or use another `output`"
    )


def check_folders(config: CorpusConfig) -> None:
    """Refuse an output with a file that `distil prepare` did not write; CorpusError names it."""
    output = config.output
    folders = [output, *(config.folder(length) for length in config.row_lengths)]
    lengths = {folder.name for folder in folders if folder != output}
    if lengths and (output / MANIFEST).exists():
        raise CorpusError(f"{output}: holds shards of one row length: use another `output`")
    # Shards without a manifest are an interrupted run's if its work folder is there, too.
    begun = (output / ".work").exists() or any((folder / MANIFEST).exists() for folder in folders)
    for folder in dict.fromkeys(folders):
        for name in sorted(os.listdir(folder)) if folder.is_dir() else ():
            ours = OURS.fullmatch(name) or (folder == output and name in lengths)
            # Hidden files, and the YAML that names the output, may stand in it.
            of_the_user = name.startswith(".") or name.endswith((".yaml", ".yml"))
            if not (begun and ours) and not of_the_user:
                raise CorpusError(
                    f"{folder}: holds {name}, no part of an unfinished corpus: use an empty or a "
                    "new folder"
                )


def open_work(plan: Plan) -> None:
    """Make the work folder; CorpusError if the output holds what is not ours."""
    check_folders(plan.config)
    plan.work.mkdir(parents=True, exist_ok=True)
    plan.cuts.save()
