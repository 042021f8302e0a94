"""Verify that a folder of shards still holds what its manifest lists."""

import hashlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from data_prep import CorpusError
from data_prep.disk import hash_file
from data_prep.disk.json_files import parse_object, read_regular
from data_prep.shards.manifest import (
    AGAIN,
    MANIFEST,
    TOKEN_COUNTS,
    FileRecord,
    Manifest,
    ShardRecord,
    labels_file,
    load_manifest,
    manifest_bytes,
    side_file,
    text_file,
)
from data_prep.shards.reading import (
    MappedShard,
    check_size,
    decoded,
    map_labels,
    map_texts,
    read_segments,
)


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
            for problem in _damage(folder, shard):
                raise CorpusError(problem)
            highest = MappedShard(folder, shard, manifest).view.max()
            if highest >= manifest.tokenizer.vocab_size:
                raise CorpusError(
                    f"{folder / shard.file}: id {highest} is outside the vocabulary: {AGAIN}"
                )
    return manifest


def check_file(folder: Path, manifest: Manifest, name: str, full: bool = True) -> Path:
    """Return the path of a file of the folder; CorpusError unless it is the one that is listed.

    `full=False` compares its size only.
    """
    for problem in _damage(folder, _record(folder, manifest, name), full):
        raise CorpusError(problem)
    return folder / name


def read_listed(folder: Path, manifest: Manifest, name: str) -> bytes:
    """Read a small file of the folder; CorpusError unless it is the one that the manifest lists."""
    record = _record(folder, manifest, name)
    for problem in _damage(folder, record, full=False):
        raise CorpusError(problem)
    try:
        data = read_regular(folder / name)
    except OSError as error:
        raise CorpusError(f"{folder / name}: cannot be read ({error.strerror}): {AGAIN}") from None
    if hashlib.sha256(data).hexdigest() != record.sha256:
        raise CorpusError(f"{folder / name}: differs from the manifest: {AGAIN}")
    return data


def _record(folder: Path, manifest: Manifest, name: str) -> FileRecord:
    for record in manifest.files:
        if record.file == name:
            return record
    raise CorpusError(f"{folder / name}: not in the manifest: {AGAIN}")


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
    for shard in chain.from_iterable(split.shards for split in manifest.splits.values()):
        problems += _damage(folder, shard, full)
    for file in manifest.files:
        problems += _damage(folder, file, full)
    if full and not problems:  # rows of a damaged file would only repeat the finding
        problems += _contents(folder, manifest)
    return problems


def _damage(folder: Path, record: ShardRecord | FileRecord, full: bool = True) -> Iterator[str]:
    """Yield how a file differs from its record: in size, or if `full` in bytes."""
    path = folder / record.file
    try:
        check_size(folder, record)
        if not full or hash_file(path)[0] == record.sha256:
            return
    except CorpusError as error:
        yield str(error)
        return
    except OSError as error:
        yield f"{path}: cannot be read ({error.strerror}): {AGAIN}"
        return
    yield f"{path}: differs from the manifest: {AGAIN}"


def _contents(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Check the rows themselves; yield what is wrong."""
    counts, whole = np.zeros(manifest.tokenizer.vocab_size, dtype=np.int64), True
    for name, split in manifest.splits.items():
        segments = 0
        for record in split.shards:
            try:
                rows = _checked_rows(folder, manifest, record)
            except CorpusError as error:
                yield str(error)
                whole = False
                continue
            segments += int((rows == manifest.tokenizer.special_ids.cls).sum())
            if name == "train":
                counts += np.bincount(rows.reshape(-1), minlength=len(counts))
        if whole and not manifest.has_labels and segments != split.segments:
            yield f"{folder}: {name} holds {segments} segments, the manifest says {split.segments}"
    if not whole or manifest.has_labels:  # of labels nothing is masked, so nothing is counted
        return
    saved = parse_object(read_regular(folder / TOKEN_COUNTS))["counts"]
    if saved != counts.tolist():
        yield f"{folder / TOKEN_COUNTS}: counts differ from the rows: {AGAIN}"


def _checked_rows(folder: Path, manifest: Manifest, record: ShardRecord) -> npt.NDArray[Any]:
    """Return the rows of a shard; CorpusError if they or the files beside them break a rule."""
    size, special = manifest.tokenizer.vocab_size, manifest.tokenizer.special_ids
    rows = MappedShard(folder, record, manifest).view
    begins, ends, padding = rows == special.cls, rows == special.sep, rows == special.pad
    # A segment ends exactly where the next one begins, or the padding, or the row.
    follows = np.ones_like(begins)
    follows[:, :-1] = (begins | padding)[:, 1:]
    highest, tokens = rows.max(), rows.size - int(padding.sum())
    wrong = {
        f"id {highest} is outside the vocabulary": highest >= size,
        f"row {int(np.argmin(begins[:, 0]))} does not start with [CLS]": not begins[:, 0].all(),
        "padding inside a row": (padding[:, :-1] & ~padding[:, 1:]).any(),
        "[MASK] in a row": (rows == special.mask).any(),
        # A pair of texts is one example, with a [SEP] between them.
        "a segment that is not [CLS] ... [SEP]": (
            not manifest.has_labels and (ends != (follows & ~padding)).any()
        ),
        f"{tokens} tokens, the manifest says {record.tokens}": tokens != record.tokens,
    }
    if problem := next((text for text, found in wrong.items() if found), ""):
        raise CorpusError(f"{folder / record.file}: {problem}: {AGAIN}")
    if manifest.has_labels:
        labels = check_file(folder, manifest, labels_file(record.file), full=False)
        if (num := map_labels(labels).num_rows) != record.rows:
            raise CorpusError(f"{labels}: {num} rows, its shard has {record.rows}: {AGAIN}")
        return rows
    # The side table names each segment of the shard, in order.
    path = folder / side_file(record.file)
    with decoded(path):
        table = pq.read_table(path, columns=["row", "start"], page_checksum_verification=True)
    found = np.stack([table["row"].to_numpy(), table["start"].to_numpy()], axis=1)
    if not np.array_equal(found, np.argwhere(begins)):
        raise CorpusError(f"{path}: does not match the segments of its shard: {AGAIN}")
    if manifest.has_texts:
        texts = check_file(folder, manifest, text_file(record.file), full=False)
        batch, (row, whole) = map_texts(texts), read_segments(path)
        if not np.array_equal(batch["row"].to_numpy(), row):
            raise CorpusError(f"{texts}: does not match the segments of its shard: {AGAIN}")
        # Documents that share an id are not known to be whole, and may have a text.
        if (whole & batch["text"].is_null().to_numpy(zero_copy_only=False)).any():
            raise CorpusError(f"{texts}: has no text of a whole document: {AGAIN}")
    return rows
