"""The ends of a run: is the folder already finished, and how it becomes so."""

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from decimal import ROUND_HALF_EVEN, Decimal, localcontext
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_prep import CorpusError
from data_prep.config import CorpusConfig, TrainTokenizer
from data_prep.extract import Extracted, input_record
from data_prep.rows import RowsResult
from data_prep.shards import Manifest, load_manifest, verify, write_file
from data_prep.shards.manifest import (
    MANIFEST,
    TOKEN_COUNTS,
    ShardRecord,
    SourceRecord,
    SpecialIds,
    SplitRecord,
    seal,
)
from data_prep.shards.writing import file_record, sync_folder
from data_prep.tokens import Tokens, load

INPUTS = "inputs.jsonl"
QUARANTINE = "quarantine.jsonl"
WORK = ".work"
SMOOTHING_LIMIT = 2**25
_OURS = re.compile(
    r"\.work|segments|tokenizer|(train|validation)-\d+\.arrow|manifest\.json\.tmp"
    r"|token_counts\.json|inputs\.jsonl|quarantine\.jsonl"
)
_LIBRARIES = ("numpy", "pyarrow", "tokenizers")


def find_finished(config: CorpusConfig, source_inputs: Sequence[list[str]]) -> Manifest | None:
    """The manifest of an output that already holds this corpus, None if there is none yet.

    CorpusError if the output holds another corpus, or a damaged one.
    """
    output = config.output
    if not (output / MANIFEST).exists():
        return None
    manifest = load_manifest(output)
    if differences := list(_differences(config, manifest, source_inputs)):
        raise CorpusError(
            f"{output}: holds shards of another corpus ({'; '.join(differences)}): "
            "use another `output`"
        )
    if problems := verify(output, full=True):
        raise CorpusError(problems[0])
    shutil.rmtree(output / WORK, ignore_errors=True)  # a kill between the manifest and its removal
    return manifest


def _differences(
    config: CorpusConfig, manifest: Manifest, source_inputs: Sequence[list[str]]
) -> Iterator[str]:
    new, old = config.content, manifest.content
    for key in sorted(new.keys() | old.keys()):
        if new.get(key) != old.get(key):
            yield f"{key}: {_short(old.get(key))} there, {_short(new.get(key))} here"
    given = None if isinstance(config.tokenizer, TrainTokenizer) else load(config.tokenizer)
    if given and given.record() != manifest.tokenizer:
        yield "the tokenizer differs"
    labels = [(source.label, source.licence) for source in config.sources]
    if labels != [(source.name, source.licence) for source in manifest.sources]:
        yield "names or licences of sources differ"
    saved = [json.loads(line) for line in (config.output / INPUTS).read_bytes().splitlines()]
    names = [(number, name) for number, names in enumerate(source_inputs) for name in names]
    if len(saved) != len(names):
        yield f"{len(saved)} input files there, {len(names)} here"
        return
    for record, (number, name) in zip(saved, names, strict=True):
        if not _same_input(record, number, name):
            yield f"input {os.path.basename(name)} has changed"
            return


def _same_input(record: dict[str, Any], number: int, name: str) -> bool:
    if (record["source"], record["input"]) != (number, os.path.basename(name)):
        return False
    if not os.path.isfile(name):
        return "sha256" not in record
    status = os.stat(name)
    if record.get("bytes") != status.st_size:
        return False
    # A copy has another time: only then is the content worth reading.
    same_time = record["mtime_ns"] == status.st_mtime_ns
    return same_time or bool(record["sha256"] == input_record(number, name)["sha256"])


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


@contextmanager
def work_folder(output: Path) -> Iterator[Path]:
    """`output`/.work, empty and locked; what an earlier, interrupted run left is removed."""
    work = output / WORK
    found = sorted(os.listdir(output)) if output.is_dir() else []
    # Shards without a manifest are an interrupted run's if its work folder is there, too.
    foreign = [name for name in found if WORK not in found or not _OURS.fullmatch(name)]
    if foreign:
        raise CorpusError(
            f"{output}: holds {foreign[0]} but no {MANIFEST}: use an empty or a new folder"
        )
    work.mkdir(parents=True, exist_ok=True)
    with _locked(work / "lock", output):
        for name in found:
            if name != WORK:
                _remove(output / name)
        _empty(work)
        try:
            yield work
        except BaseException as error:
            # The empty folder stays: it marks the output as unfinished, and ours.
            _empty(work)
            if isinstance(error, OSError) and error.filename is None:
                error.filename = str(output)  # a full disk does not say which
            raise
        shutil.rmtree(work)


@contextmanager
def _locked(path: Path, output: Path) -> Iterator[None]:
    import fcntl  # absent on Windows, where only this command needs it

    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CorpusError(
                f"{output}: another `distil prepare` is writing here: wait for it"
            ) from None
        yield


def _empty(work: Path) -> None:
    for entry in work.iterdir():
        if entry.name != "lock":
            _remove(entry)


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink()


def finish(
    config: CorpusConfig,
    tokens: Tokens,
    extracted: Sequence[Extracted],
    results: Sequence[RowsResult],
    sources: Sequence[SourceRecord],
    work: Path,
) -> Manifest:
    """Move the finished files to their places; the manifest comes last."""
    final = work / "final"
    (final / "segments").mkdir()
    splits = _splits(results, final)
    counts = sum((r.counts for r in results if r.unit.split == "train"), np.zeros(1, np.int64))
    _write_json(
        final / TOKEN_COUNTS,
        {"counts": counts.tolist(), "smoothing": smoothing(counts, tokens.special_ids)},
    )
    lines = (json.dumps(record) + "\n" for result in extracted for record in result.inputs)
    write_file(final / INPUTS, lambda file: file.writelines(line.encode() for line in lines))
    quarantines = [result.quarantine for result in extracted]
    write_file(
        final / QUARANTINE, lambda file: file.writelines(path.read_bytes() for path in quarantines)
    )
    shards = {shard.file for split in splits.values() for shard in split.shards}
    names = sorted(p.relative_to(final).as_posix() for p in final.rglob("*") if p.is_file())
    manifest = seal(
        {
            "tokenizer": tokens.record(),
            "row_length": config.row_length,
            "dtype": results[0].unit.dtype,
            "splits": splits,
            "files": tuple(file_record(final, name) for name in names if name not in shards),
            "sources": tuple(sources),
            "content": config.content,
            "code_version": _version("distil-pretraining"),
            "created_by": {name: _version(name) for name in _LIBRARIES},
        }
    )
    for entry in sorted(final.iterdir()):
        os.replace(entry, config.output / entry.name)
    sync_folder(config.output)
    _write_json(config.output / MANIFEST, manifest.model_dump(mode="json"))
    return manifest


def _splits(results: Sequence[RowsResult], final: Path) -> dict[str, SplitRecord]:
    """Number the shards without gaps and move them and their side tables to `final`."""
    splits: dict[str, SplitRecord] = {}
    for split in ("train", "validation"):
        shards: list[ShardRecord] = []
        segments = 0
        for result in results:
            if result.unit.split != split or result.shard is None:
                continue
            name = f"{split}-{len(shards):05d}"
            written = result.unit.folder / result.shard.file
            os.replace(written, final / f"{name}.arrow")
            os.replace(written.with_suffix(".parquet"), final / "segments" / f"{name}.parquet")
            shards.append(result.shard.model_copy(update={"file": f"{name}.arrow"}))
            segments += result.segments
        if shards:
            splits[split] = SplitRecord(
                rows=sum(shard.rows for shard in shards),
                tokens=sum(shard.tokens for shard in shards),
                segments=segments,
                shards=tuple(shards),
            )
    return splits


def smoothing(counts: npt.NDArray[np.int64], special: SpecialIds) -> list[int]:
    """count ** 0.7 as integers from 1 to 2**25 - 1, for sampling by count ** -0.7.

    Special ids are never sampled and have the largest value, so that padding takes no range.
    """
    specials = set(special.model_dump().values())
    with localcontext() as context:  # exact and the same on every machine, as libm's pow is not
        context.prec = 40
        context.rounding = ROUND_HALF_EVEN
        power = {count: Decimal(max(count, 1)) ** Decimal("0.7") for count in set(counts.tolist())}
        powers = [power[count] for count in counts.tolist()]
        largest = max(value for id, value in enumerate(powers) if id not in specials)
        scale = (SMOOTHING_LIMIT - 1) / largest
        return [
            SMOOTHING_LIMIT - 1
            if id in specials
            else max(1, int((value * scale).to_integral_value()))
            for id, value in enumerate(powers)
        ]


def _write_json(path: Path, value: object) -> None:
    data = (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()
    write_file(path, lambda file: file.write(data))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
