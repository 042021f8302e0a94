"""Verify that a folder of shards still holds what its manifest lists."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from data_prep import CorpusError
from data_prep.disk import hash_file
from data_prep.disk.json_files import parse_object, read_regular
from data_prep.messages import error_line
from data_prep.shards.manifest import (
    AGAIN,
    MANIFEST,
    TOKEN_COUNTS,
    FileRecord,
    Manifest,
    ShardRecord,
    load_manifest,
    manifest_bytes,
)
from data_prep.shards.reading import MappedShard, block_differs, check_size
from data_prep.shards.writing import hash_blocks


def check(folder: Path | str) -> Manifest:
    """Compare every file that training reads with its sha256, and ids with the vocabulary's size.

    Raises CorpusError at a difference.
    """
    folder = Path(folder)
    manifest = load_manifest(folder)
    for file in manifest.files:
        if file.file == TOKEN_COUNTS or file.file.startswith("tokenizer/"):
            read_listed(folder, manifest, file.file)
    for split in manifest.splits.values():
        for shard in split.shards:
            for problem in _shard_bytes(folder, shard):
                raise CorpusError(problem)
            highest = MappedShard(folder, shard, manifest).view.max()
            if highest >= manifest.tokenizer.vocab_size:
                raise CorpusError(f"{folder / shard.file}: {_outside(highest)}: {AGAIN}")
    return manifest


def check_file(folder: Path, manifest: Manifest, name: str) -> Path:
    """Return the path of a file of the folder; CorpusError unless it is the one that is listed."""
    path = folder / name
    record = next((file for file in manifest.files if file.file == name), None)
    if record is None:
        raise CorpusError(f"{path}: not in the manifest: {AGAIN}")
    for problem in _file_bytes(folder, record, full=True):
        raise CorpusError(problem)
    return path


def read_listed(folder: Path, manifest: Manifest, name: str) -> bytes:
    """Read a small file of the folder; CorpusError unless it is the one that the manifest lists."""
    record = next((file for file in manifest.files if file.file == name), None)
    if record is None:
        raise CorpusError(f"{folder / MANIFEST}: does not list {name}: {AGAIN}")
    for problem in _file_bytes(folder, record, full=False):
        raise CorpusError(problem)
    try:
        data = read_regular(folder / name)
    except OSError as error:
        raise CorpusError(f"{folder / name}: cannot be read ({error.strerror}): {AGAIN}") from None
    if hashlib.sha256(data).hexdigest() != record.sha256:
        raise CorpusError(f"{folder / name}: differs from the manifest: {AGAIN}")
    return data


def verify(folder: Path | str, full: bool = True) -> list[str]:
    """Return every problem found, one line each; `full=False` looks at sizes only."""
    folder = Path(folder)
    try:
        manifest = load_manifest(folder)
    except CorpusError as error:
        return [str(error)]
    problems = []
    # The manifest's own sums.
    for name, split in manifest.splits.items():
        rows = sum(shard.rows for shard in split.shards)
        tokens = sum(shard.tokens for shard in split.shards)
        if (rows, tokens) != (split.rows, split.tokens):
            problems.append(
                f"{folder}: {name} shards hold {rows} rows, the manifest says {split.rows}"
            )
    for source in manifest.sources:
        if source.documents_in != source.documents_kept + sum(source.dropped.values()):
            problems.append(
                f"{folder}: source {source.name}: documents in differ from kept + dropped"
            )
    if read_regular(folder / MANIFEST) != manifest_bytes(manifest):
        problems.append(f"{folder / MANIFEST}: not as it was written: {AGAIN}")
    for split in manifest.splits.values():
        for shard in split.shards:
            problems += _shard_bytes(folder, shard) if full else _size(folder, shard)
    for file in manifest.files:
        problems += _file_bytes(folder, file, full)
    if full and not problems:  # rows of a damaged file would only repeat the finding
        problems += _contents(folder, manifest)
    return problems


def _size(folder: Path, record: ShardRecord) -> Iterator[str]:
    try:
        check_size(folder, record)
    except CorpusError as error:
        yield str(error)


def _shard_bytes(folder: Path, record: ShardRecord) -> Iterator[str]:
    wrong_size = list(_size(folder, record))
    yield from wrong_size
    path = folder / record.file
    if wrong_size:
        return
    try:
        if hash_file(path)[0] == record.sha256:
            return
        blocks = hash_blocks(path, record.block_bytes)
    except OSError as error:
        yield f"{path}: cannot be read ({error.strerror}): {AGAIN}"
        return
    pairs = enumerate(zip(blocks, record.blocks, strict=False))
    different = [number for number, (found, expected) in pairs if found != expected]
    if not different:
        yield f"{path}: differs from the manifest: {AGAIN}"
    for number in different:
        yield block_differs(path, record, number)


def _file_bytes(folder: Path, record: FileRecord, full: bool) -> Iterator[str]:
    path = folder / record.file
    if not path.is_file():
        yield f"{path}: missing: {AGAIN}"
    elif path.stat().st_size != record.bytes:
        yield f"{path}: {path.stat().st_size} bytes, the manifest says {record.bytes}: {AGAIN}"
    elif full and hash_file(path)[0] != record.sha256:
        yield f"{path}: differs from the manifest: {AGAIN}"


def _contents(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Check the rows themselves; yield what is wrong."""
    counts = np.zeros(manifest.tokenizer.vocab_size, dtype=np.int64)
    for name, split in manifest.splits.items():
        segments = 0
        for record in split.shards:
            try:
                rows = MappedShard(folder, record, manifest).view
                problem, starts = check_rows(rows, record, manifest)
            except CorpusError as error:
                yield str(error)
                continue
            if problem:
                yield f"{folder / record.file}: {problem}: {AGAIN}"
                continue
            segments += len(starts)
            if name == "train":
                counts += np.bincount(rows.reshape(-1), minlength=len(counts))
            # The side table names each segment of the shard, in order.
            path = (folder / "segments" / record.file).with_suffix(".parquet")
            try:
                table = pq.read_table(
                    path, columns=["row", "start"], page_checksum_verification=True
                )
            except (pa.ArrowException, OSError) as error:
                yield f"{path}: does not decode ({error_line(error)}): {AGAIN}"
                continue
            found = np.stack([table["row"].to_numpy(), table["start"].to_numpy()], axis=1)
            if not np.array_equal(found, starts):
                yield f"{path}: does not match the segments of its shard: {AGAIN}"
        if segments != split.segments:
            yield f"{folder}: {name} holds {segments} segments, the manifest says {split.segments}"
    saved = parse_object(read_regular(folder / TOKEN_COUNTS))["counts"]
    if saved != counts.tolist():
        yield f"{folder / TOKEN_COUNTS}: counts differ from the rows: {AGAIN}"


def check_rows(
    rows: npt.NDArray[Any], record: ShardRecord, manifest: Manifest
) -> tuple[str, npt.NDArray[np.int64]]:
    """Check rows [n, row_length]; return a problem ("" if none) and where segments begin [s, 2]."""
    special = manifest.tokenizer.special_ids
    none = np.empty((0, 2), dtype=np.int64)
    if rows.max() >= manifest.tokenizer.vocab_size:
        return _outside(rows.max()), none
    begins, ends, padding = rows == special.cls, rows == special.sep, rows == special.pad
    if not begins[:, 0].all():
        return f"row {int(np.argmin(begins[:, 0]))} does not start with [CLS]", none
    if (padding[:, :-1] & ~padding[:, 1:]).any():
        return "padding inside a row", none
    if (rows == special.mask).any():
        return "[MASK] in a row", none
    # A segment ends exactly where the next one begins, or the padding, or the row.
    follows = begins | padding
    follows = np.concatenate([follows[:, 1:], np.ones((len(rows), 1), dtype=bool)], axis=1)
    if (ends != (follows & ~padding)).any():
        return "a segment that is not [CLS] ... [SEP]", none
    if rows.size - int(padding.sum()) != record.tokens:
        return f"{rows.size - int(padding.sum())} tokens, the manifest says {record.tokens}", none
    return "", np.argwhere(begins)


def _outside(id: int) -> str:
    return f"id {id} is outside the vocabulary"
