"""Make a finished folder of shards from a corpus file: at once, after kills, or on many machines.

All of these run the same units, so that the bytes are identical.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatch
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any

import numpy as np

from data_prep import CorpusError
from data_prep.config import CorpusConfig
from data_prep.disk import Lock, lock
from data_prep.messages import Progress, megabytes
from data_prep.pipeline.engines import Engine, Run, started
from data_prep.pipeline.finished import find_finished, open_work
from data_prep.pipeline.plan import PART_BYTES, PIECE_BYTES, STAGES, Plan
from data_prep.pipeline.processes import FailedError, WorkerDiedError
from data_prep.pipeline.ray_tasks import num_nodes
from data_prep.pipeline.stages.extract import place_of
from data_prep.pipeline.stages.finish import (
    MANY_UNKNOWN,
    READS,
    check_unknown,
    finish,
    near_warnings,
    split_warning,
    unknown_share,
    unknown_text,
)
from data_prep.pipeline.store import StoredStage
from data_prep.pipeline.units import Reads, Unit, UnitRecord, is_output_whole, is_same, run_unit
from data_prep.pipeline.watchdog import START, last_seen
from data_prep.shards import Manifest, read_listed
from data_prep.shards.manifest import TOKEN_COUNTS, UnknownRecord
from data_prep.sources.remote import looked_up_once

Warn = Callable[[str], None]


def prepare(
    config: CorpusConfig,
    progress: Progress = lambda stage, done, total, text: None,
    warn: Warn = lambda text: None,
    *,
    engine: Engine = "processes",
    accept_code: bool = False,
    part_bytes: int = PART_BYTES,
    piece_bytes: int = PIECE_BYTES,
) -> Manifest:
    """Make `config.output`, or find it finished; return the manifest of the first row length.

    `progress(stage, done, total, text)` is called as units of work end, with bytes that a stage has
    read, or units where it reads no texts. Units that an earlier run finished are checked and
    skipped. Raises CorpusError for anything the user must fix; OSError (disk full, read-only)
    passes through. Finished shards of another configuration are never overwritten.
    `accept_code` keeps finished shards that different code of the same behaviour made.
    """
    plan = Plan(config, part_bytes, piece_bytes, warn)
    _ = plan.tokenizer  # one that does not load is found before hours of reading
    if finished := find_finished(plan, warn, accept_code):
        for manifest in finished:
            _check_unknown(plan, manifest, warn)
        _clear(plan, warn)  # killed between the manifest and its removal
        return finished[0]
    plan.check_sources()
    open_work(plan)
    with (
        _held(plan, "prepare") as held,
        nullcontext() if plan.store is None else plan.store.joined(),
        started(config.workers, engine, plan.shared) as run,
    ):
        for stage in STAGES:
            units = plan.units(stage)
            _check_what_is_read(plan, STAGES[stage].reads, units)
            _run(plan, stage, units, held, progress, warn, run, engine)
            _require_rows(plan, stage)
        return _finish(plan, warn)


def prepare_stage(
    config: CorpusConfig,
    stage: str,
    task: int = 1,
    tasks: int = 1,
    progress: Progress = lambda stage, done, total, text: None,
    warn: Warn = lambda text: None,
    *,
    engine: Engine = "processes",
    part_bytes: int = PART_BYTES,
    piece_bytes: int = PIECE_BYTES,
) -> int:
    """Run every `tasks`-th unit of one stage, from unit `task` (of 1 to `tasks`); return how many.

    CorpusError while an earlier stage is not complete.
    """
    assert 1 <= task <= tasks
    plan = Plan(config, part_bytes, piece_bytes, warn)
    if find_finished(plan, warn):
        return 0
    open_work(plan)
    units = plan.units(stage)[task - 1 :: tasks]
    if any(unit.pieces for unit in units):
        plan.check_sources()
    _check_what_is_read(plan, STAGES[stage].reads, units)
    with (
        _held(plan, f"{stage}-{task}-of-{tasks}") as held,
        started(config.workers, engine, plan.shared) as run,
    ):
        _run(plan, stage, units, held, progress, warn, run, engine)
    return len(units)


def finalise(
    config: CorpusConfig,
    warn: Warn = lambda text: None,
    *,
    part_bytes: int = PART_BYTES,
    piece_bytes: int = PIECE_BYTES,
) -> Manifest:
    """Put together what the stages made; CorpusError if one is not complete."""
    plan = Plan(config, part_bytes, piece_bytes, warn)
    if finished := find_finished(plan, warn):
        _clear(plan, warn)
        return finished[0]
    open_work(plan)
    for stage in STAGES:
        plan.records(stage)
        _require_rows(plan, stage)
    return _finish(plan, warn)


def _finish(plan: Plan, warn: Warn) -> Manifest:
    with _held(plan, "finalise"):
        # Another process may have finished while this one waited; then `.work` is gone.
        finished = find_finished(plan, lambda text: None)
        if not finished:
            _check_what_is_read(plan, READS, [])
            for stage, patterns in READS.items():
                plan.bring(stage, patterns)
            results = (record.result for record in plan.records("extract"))
            skipped = {entry for result in results for entry in result.get("skipped", ())}
            for entry in dict.fromkeys(plan.config.skip_documents):
                if entry not in skipped:
                    warn(f"skip_documents: no document is called {entry!r}: compare the ids")
            finished = [finish(plan, length) for length in plan.config.row_lengths]
            for source in finished[0].sources:
                if not source.documents_kept:
                    warn(f"source {source.name}: none of its documents is in the corpus")
            for text in (*near_warnings(plan, finished[0]), split_warning(plan, finished[0])):
                if text:
                    warn(text)
        _clear(plan, warn)
    for manifest in finished:
        _check_unknown(plan, manifest, warn)
    return finished[0]


def _clear(plan: Plan, warn: Warn) -> None:
    """Remove what the stages of a finished corpus have written for each other."""
    if plan.store is not None:
        try:
            if others := plan.store.leave():
                warn(
                    f"{plan.store.url}: another run of this corpus ({others[0].named}) is at work "
                    "there, or was killed: it is left; remove it when none is"
                )
            else:
                plan.store.remove()
        except CorpusError as error:
            warn(f"{error}: what stages wrote is left there")
    shutil.rmtree(plan.work, ignore_errors=True)


def _check_unknown(plan: Plan, manifest: Manifest, warn: Warn) -> None:
    """Refuse finished shards with too many unknown tokens, and warn of many."""
    unknown = unknown_of(plan.config.folder(manifest.row_length), manifest)
    check_unknown(plan.config, unknown)
    if unknown.share > MANY_UNKNOWN:
        warn(
            f"in rows of {manifest.row_length} {unknown_text(unknown)}: is this the tokenizer of "
            "this text?"
        )


def unknown_of(folder: Path, manifest: Manifest) -> UnknownRecord:
    """Return the share of unknown tokens of finished shards."""
    if manifest.unknown is not None:
        return manifest.unknown
    # Few, or an earlier version did not look.
    counts = np.array(json.loads(read_listed(folder, manifest, TOKEN_COUNTS))["counts"])
    share = unknown_share(counts, manifest.tokenizer.special_ids)
    return UnknownRecord(share=share, strings={})


def _check_what_is_read(plan: Plan, reads: Reads, units: Sequence[Unit]) -> None:
    """Raise CorpusError if files that the units (or, without any, `reads`) need have changed."""
    if units and not any(unit.upstream for unit in units):
        return  # such as a vocabulary that is named, and not trained
    parts = {file for unit in units for file in STAGES[unit.stage].files_read(unit.task)}
    listed = {file.parent.parent for file in parts}  # stages whose files the units name
    for earlier, patterns in reads.items():
        made = list(zip(plan.units(earlier), plan.records(earlier), strict=True))
        with looked_up_once():
            for unit, record in made:
                for (_, name, piece), read in zip(unit.pieces, record.inputs, strict=True):
                    if not is_same(piece, read, with_others=True):
                        raise CorpusError(
                            f"{name}: changed since it was read: run all stages again from "
                            f"{earlier} on"
                        )
        for unit, record in made:
            for output in record.outputs if plan.store is None else ():  # a task compares its own
                file = unit.folder / output.file
                # A unit reads only its own parts; comparing all would take hours.
                others = unit.folder.parent in listed and file not in parts
                if others or not any(fnmatch(output.file, pattern) for pattern in patterns):
                    continue
                if not is_output_whole(unit, output):
                    raise CorpusError(
                        f"{file}: missing or altered since it was written: run `distil prepare "
                        f"CONFIG --stage {earlier}` or all of `distil prepare CONFIG` again, where "
                        "`output` is visible to every machine"
                    )


@contextmanager
def _held(plan: Plan, name: str) -> Iterator[Lock]:
    output = plan.config.output
    try:
        with lock(plan.work / "locks", name, output=output) as held:
            yield held
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(output)  # a full disk does not say which
        raise


def _run(
    plan: Plan,
    stage: str,
    units: list[Unit],
    held: Lock,
    progress: Progress,
    warn: Warn,
    run: Run,
    engine: Engine,
) -> None:
    if not units:
        return
    home = plan.work / stage
    home.mkdir(exist_ok=True)
    others = plan.of_other_code(stage)
    mine = [unit.number for unit in units if unit.number in others]
    if len(mine) < len(others):  # another task's, and the stage would be made by two versions
        raise CorpusError(
            f"{plan.config.output}: {len(others)} of {len(plan.units(stage))} units of stage "
            f"{stage} were made by different code ({others[min(others)]}): run all tasks with one "
            f"version; to make the stage again with this one, delete "
            + (str(home) if plan.store is None else f"{plan.store.url}/{stage}")
        )
    if mine:
        warn(
            f"{len(mine)} of {len(units)} units of stage {stage} were made by different code "
            f"({others[mine[0]]}): making them again"
        )

    function: Callable[[Any], UnitRecord] = partial(run_unit, STAGES[stage].run)
    items: Sequence[Any] = units
    if plan.store is None:
        sizes = [_bytes_read(unit) for unit in units]
    else:
        shared, own = plan.needs(units)
        function = StoredStage(STAGES[stage].run, plan.store, plan.work, tuple(shared))
        items = [(unit, tuple(files)) for unit, files in zip(units, own, strict=True)]
        of_files = (sum(file.record.bytes for file in files) for files in own)
        pieces = (sum(piece.size for *_, piece in unit.pieces) for unit in units)
        sizes = [a + b for a, b in zip(pieces, of_files, strict=True)]
    by_bytes = all(sizes)
    sizes = sizes if by_bytes else [1] * len(units)
    total, done, documents, ended = sum(sizes), 0, 0, 0

    def report(number: int, record: UnitRecord) -> None:
        nonlocal done, documents, ended
        held.check()
        ended += 1
        done += sizes[number]
        documents += record.result.get("documents_in", 0)
        show()

    def show() -> None:
        text = f"{done} of {total}"
        if by_bytes:
            count = f", {documents:,} documents" if documents else ""
            text = f"{megabytes(done)} of {megabytes(total)} MB{count}"
        if engine == "ray":
            text += f", {ended} of {len(units)} units, {num_nodes()} node(s)"
        progress(stage, done, total, text)

    show()
    begun = time.time()
    if engine == "processes":
        for entry, num in Counter(last_seen(home)).items():
            if num > 1 and entry != START:
                warn(f"{num} workers that were ended read {entry}: if this one is, {_leave(entry)}")
    try:
        records = run(function, items, report)
    except FailedError as error:
        raise _failed(plan, units, error, begun, warn) from None
    if len(units) == len(plan.units(stage)):
        plan.finished(stage, records)
    warnings = (text for record in records for text in STAGES[stage].warnings(record.result))
    for text in dict.fromkeys(warnings):  # all units may give the same one
        warn(text)


def _failed(
    plan: Plan, units: Sequence[Unit], error: FailedError, begun: float, warn: Warn
) -> CorpusError:
    """Return what ends the command when units of a stage have failed; tell of each if several."""
    stage, reasons = units[0].stage, dict[str, None]()  # several units may fail for one reason
    for number, failure in sorted(error.failures.items()):
        unit = units[number]
        if not isinstance(failure, WorkerDiedError):
            reasons[str(failure)] = None
            continue
        seen = last_seen(plan.work / stage, unit.folder.name, begun)
        text = f"unit {unit.number} of stage {stage}"
        if unit.pieces:
            text += f" ({', '.join(starmap(place_of, unit.pieces[:3]))})"
        text += f": {failure}"
        if len(seen) > 1 and len(set(seen)) == 1 and seen[0] != START:
            text += f" while it read {seen[0]}: {_leave(seen[0])}"
        elif seen:
            text += f"; last read: {' and '.join(seen)}: use fewer `workers`"
            if seen[-1] != START:
                text += f"; if it is read again when a worker dies, {_leave(seen[-1])}"
        reasons[text] = None
    if len(reasons) == 1:
        return CorpusError(next(iter(reasons)))
    for text in reasons:
        warn(text)
    not_tried = f", and {error.not_tried} were not tried" if error.not_tried else ""
    return CorpusError(
        f"{plan.config.output}: {len(error.failures)} of {len(units)} units of stage {stage} "
        f"failed for the reasons above{not_tried}: finished ones are kept, and the same command "
        "makes the others"
    )


def _leave(entry: str) -> str:
    return f"leave it out with `skip_documents: [{json.dumps(entry, ensure_ascii=False)}]`"


def _bytes_read(unit: Unit) -> int:
    """Return the bytes of the sources, or of an earlier stage's parts, that a unit reads; or 0."""
    if unit.pieces:
        return sum(piece.size for _, _, piece in unit.pieces)
    return sum(file.stat().st_size for file in STAGES[unit.stage].files_read(unit.task))


def _require_rows(plan: Plan, stage: str) -> None:
    """Raise CorpusError, with counts of dropped documents, if no training row can come."""
    if not STAGES[stage].leaves_rows(plan.records(stage)):
        extracted = [record.result for record in plan.records("extract")]
        dropped = sum((Counter(result["dropped"]) for result in extracted), Counter())
        documents = sum(result["documents_in"] for result in extracted)
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()))
        plan.bring("extract", ("quarantine.jsonl",))
        logs = (folder / "quarantine.jsonl" for folder in plan.folders("extract"))
        lines = (line for log in logs for line in log.read_text(encoding="utf-8").splitlines())
        first = next((detail for line in lines if (detail := json.loads(line)["detail"])), "")
        raise CorpusError(
            f"{plan.config.output}: no training row: {documents} documents read"
            + (f" ({reasons}; the first one {first})" if first else f" ({reasons})" * bool(reasons))
            + ": add text, or loosen `min_characters`, `languages`, `fraction` or `validation`"
        )
