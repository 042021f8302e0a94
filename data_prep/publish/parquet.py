"""Write finished shards as a Parquet folder for the Hugging Face Hub."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_prep import CorpusError
from data_prep.audit import side_table
from data_prep.disk import sync
from data_prep.disk.json_files import indented_json, parse_object, read_regular
from data_prep.messages import Progress
from data_prep.pipeline.stage import group
from data_prep.publish.card import dataset_card
from data_prep.shards import Manifest, check_file, load_manifest, open_shards, read_listed
from data_prep.shards.manifest import MANIFEST, TOKEN_COUNTS, text_file
from data_prep.shards.reading import map_texts
from data_prep.shards.writing import file_record

PROVENANCE = "provenance"
FILES = f"{PROVENANCE}/files.json"  # sha256 and size of every other file
FILE_BYTES = 2**29  # of ids in a file; zstd halves them
GROUP_BYTES = 2**23  # of ids in a row group
CHAIN = "provenance.jsonl"  # from input to shard
CODE = "code.json"  # what made the shards


def check_destination(destination: Path) -> None:
    """Refuse a file, and a folder that holds anything but a corpus in Parquet.

    Raises:
        CorpusError: names the destination.
    """
    if destination.exists() and not destination.is_dir():
        raise CorpusError(f"{destination}: a file stands there: choose another folder")
    ours = (destination / PROVENANCE / MANIFEST).is_file()
    if destination.exists() and any(destination.iterdir()) and not ours:
        raise CorpusError(f"{destination}: not empty: choose an empty or a new folder")


def to_parquet(
    folder: Path, destination: Path, progress: Progress | None = None, file_bytes: int = FILE_BYTES
) -> Literal["done", "up to date"]:
    """Write finished shards as a folder that `datasets.load_dataset` and the Hub read.

    Rows keep their order, so row numbers mean the same in both. Everything is written next to
    the destination and renamed, so the destination is complete or missing.

    Args:
        folder: of shards.
        destination: a new or an empty folder, or one that holds this corpus already.
        progress: called with (stage, files done, files in all, the same for people).
        file_bytes: of ids to a parquet file, before compression.

    Raises:
        CorpusError: damaged shards, or a destination that is taken or damaged.
        OSError: the disk is full or read-only; the destination is untouched.
    """
    destination = Path(os.path.abspath(destination))
    manifest = load_manifest(folder)
    check_destination(destination)
    if destination.exists() and any(destination.iterdir()):
        there = load_manifest(destination / PROVENANCE)
        if (there.digest, there.sources) != (manifest.digest, manifest.sources):
            raise CorpusError(f"{destination}: holds another corpus: choose another folder")
        again = "restore it, or delete the folder and write it again"
        try:
            files: dict[str, Any] = parse_object(read_regular(destination / FILES))
            for name, entry in files.items():
                if file_record(destination, name).model_dump() != {"file": name, **entry}:
                    raise CorpusError(f"{destination / name}: damaged: {again}")
        except CorpusError:
            raise
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise CorpusError(f"{destination}: damaged ({error}): {again}") from None
        return "up to date"
    temporary = destination.with_name(f".tmp-{destination.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        _write(Path(folder), manifest, temporary, destination.name, progress, file_bytes)
        if destination.exists():
            destination.rmdir()  # it is empty
        temporary.rename(destination)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sync(destination.parent)
    return "done"


def _write(
    folder: Path,
    manifest: Manifest,
    target: Path,
    name: str,
    progress: Progress | None,
    file_bytes: int,
) -> None:
    report = progress or (lambda stage, done, total, text: None)
    for part in ("data", "segments", "tokenizer", PROVENANCE):
        (target / part).mkdir()
    dtype = np.dtype(manifest.dtype)
    kind = pa.list_(pa.from_numpy_dtype(dtype), manifest.row_length)
    row_bytes = manifest.row_length * dtype.itemsize
    step = max(1, GROUP_BYTES // row_bytes)
    # The side tables of shards as one: rows are counted over the split, and sources have names.
    schema = pa.schema(
        {
            "row": pa.int64(),
            "start": pa.int32(),
            **dict.fromkeys(("source", "licence", "document", "title", "url"), pa.string()),
            **({"text": pa.string()} if manifest.has_texts else {}),
        }
    )
    names = pa.array([source.name for source in manifest.sources])
    licences = pa.array([source.licence for source in manifest.sources])
    options = {"compression": "zstd", "write_page_checksum": True, "write_page_index": True}
    groups = {
        name: group([shard.rows * row_bytes for shard in split.shards], file_bytes)
        for name, split in manifest.splits.items()
    }
    total, done = sum(map(len, groups.values())), 0
    report("write parquet", 0, total, f"0 of {total} files")
    for split, members in groups.items():
        shards = open_shards(folder, split)
        for place, chosen in enumerate(members):
            file = f"{split}-{place:05d}-of-{len(members):05d}.parquet"
            records = manifest.splits[split].shards
            first = sum(record.rows for record in records[: chosen.start])
            end = sum(record.rows for record in records[: chosen.stop])
            ids = pa.schema({"input_ids": kind})
            with pq.ParquetWriter(target / "data" / file, ids, **options) as writer:
                for start in range(first, end, step):
                    rows = shards.rows(np.arange(start, min(start + step, end))).reshape(-1)
                    column = pa.FixedSizeListArray.from_arrays(pa.array(rows), type=kind)
                    writer.write_batch(pa.record_batch([column], schema=writer.schema))
            with pq.ParquetWriter(target / "segments" / file, schema, **options) as writer:
                for record in records[chosen.start : chosen.stop]:
                    side = side_table(folder, manifest, record.file)
                    table = pq.read_table(side, page_checksum_verification=True)
                    columns = {
                        "row": pa.array(table["row"].to_numpy().astype(np.int64) + first),
                        "start": table["start"].cast(pa.int32()),
                        "source": names.take(table["source"].combine_chunks()),
                        "licence": licences.take(table["source"].combine_chunks()),
                        **{name: table[name] for name in ("document", "title", "url")},
                    }
                    if manifest.has_texts:
                        texts = check_file(folder, manifest, text_file(record.file))
                        columns["text"] = map_texts(texts)["text"].cast(pa.string())
                    writer.write_table(pa.table(columns, schema=schema))
                    first += record.rows
            done += 1
            report("write parquet", done, total, f"{done} of {total} files")
    listed = [record.file for record in manifest.files]
    for file in listed:
        if file.startswith("tokenizer/"):
            (target / file).write_bytes(read_listed(folder, manifest, file))
    kept = [file for file in (TOKEN_COUNTS, CHAIN, CODE) if file in listed]
    for provenance in kept:
        check_file(folder, manifest, provenance)
    for provenance in (MANIFEST, *kept):
        shutil.copy(folder / provenance, target / PROVENANCE / provenance)
    dataset_card(name, manifest).save(target / "README.md")
    paths = sorted(path for path in target.rglob("*") if path.is_file())
    written = [path.relative_to(target).as_posix() for path in paths]
    entries = {n: file_record(target, n).model_dump(exclude={"file"}) for n in written}
    (target / FILES).write_bytes(indented_json(entries))
    for path in [*target.rglob("*"), target]:
        sync(path)
