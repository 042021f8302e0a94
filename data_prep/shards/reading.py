"""Read the rows of a split through memory-mapped numpy views."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from data_prep import CorpusError
from data_prep.messages import error_line
from data_prep.shards.manifest import AGAIN, FileRecord, Manifest, ShardRecord, Split, load_manifest
from data_prep.shards.writing import TEXTS

_DAMAGE = (pa.ArrowException, OSError, LookupError, ValueError, TypeError, StopIteration)


@contextmanager
def decoded(path: Path) -> Iterator[None]:
    """Turn what a damaged file raises when it is decoded into CorpusError."""
    try:
        yield
    except _DAMAGE as error:
        raise CorpusError(f"{path}: does not decode ({error_line(error)}): {AGAIN}") from None


class MappedShard:
    """Map one shard into memory; verify its blocks when rows first need them."""

    def __init__(self, folder: Path, record: ShardRecord, manifest: Manifest) -> None:
        """Raise CorpusError if bytes around the rows are damaged or the shard does not decode."""
        self.path = folder / record.file
        self._record = record
        self._row_bytes = manifest.row_length * np.dtype(manifest.dtype).itemsize
        self._unverified = np.ones(len(record.blocks), dtype=bool)
        try:
            buffer = pa.memory_map(str(self.path)).read_buffer()
        except OSError as error:
            raise CorpusError(f"{self.path}: cannot be read ({error.strerror}): {AGAIN}") from None
        around = record.bytes - record.rows * self._row_bytes
        if buffer.size != record.bytes or around <= 0:
            raise CorpusError(
                f"{self.path}: has {buffer.size} bytes; the manifest says {record.bytes}: {AGAIN}"
            )
        self._bytes = memoryview(buffer)
        # What is decoded is verified first: all but the rows lies at the two ends of the file.
        self._verify(np.array([0, record.bytes - around]), np.array([around, record.bytes]))
        kind = pa.list_(getattr(pa, manifest.dtype)(), manifest.row_length)
        with decoded(self.path):
            with pa.ipc.open_stream(buffer) as stream:
                batch = stream.read_next_batch()
            column = batch.column("input_ids")
            column.validate()
            if column.type != kind or column.null_count or len(column) != record.rows:
                raise pa.ArrowInvalid(f"{len(column)} rows of {column.type}")
            values = np.from_dlpack(column.flatten())  # without a copy, and without pandas
        #: The rows [rows, row_length] without a copy, and without verification.
        self.view: npt.NDArray[Any] = values.reshape(record.rows, manifest.row_length)
        self._start = self.view.ctypes.data - buffer.address

    def rows(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Return a copy of rows [n, row_length] of the shard, verified."""
        if self._unverified.any():
            starts = self._start + indices * self._row_bytes
            self._verify(starts, starts + self._row_bytes)
        rows: npt.NDArray[Any] = self.view[indices]
        return rows

    def _verify(self, starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> None:
        """Hash the blocks in which the byte ranges lie, unless that is done."""
        size, num_blocks = self._record.block_bytes, len(self._unverified)
        change = np.bincount(starts // size, minlength=num_blocks + 1)
        change -= np.bincount((ends - 1) // size + 1, minlength=num_blocks + 1)
        touched = np.cumsum(change)[:-1] > 0
        for block in np.flatnonzero(touched & self._unverified).tolist():
            data = self._bytes[block * size : (block + 1) * size]
            if xxhash.xxh3_128_hexdigest(data) != self._record.blocks[block]:
                raise CorpusError(block_differs(self.path, self._record, block))
            self._unverified[block] = False


class ShardSet:
    """Hold one split: `len()` rows of `row_length` ids; it is pickled as its folder's name."""

    def __init__(self, folder: Path, split: Split, manifest: Manifest) -> None:
        self.folder = folder
        self.split = split
        self.manifest = manifest
        self.row_length = manifest.row_length
        shards = manifest.splits[split].shards
        for shard in shards:
            check_size(folder, shard)
        #: The first row of each shard, and the end.
        self.starts = np.cumsum([0] + [shard.rows for shard in shards])
        self._shards: list[MappedShard | None] = [None] * len(shards)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __reduce__(self) -> tuple[Any, ...]:
        # A DataLoader worker maps the files again instead of receiving their rows.
        return open_shards, (self.folder, self.split)

    def rows(self, indices: npt.ArrayLike) -> npt.NDArray[Any]:
        """Gather rows [n, row_length] in the manifest's dtype; IndexError outside 0..len-1.

        CorpusError if a block of a file that they lie in is not what the manifest says: each is
        hashed when this process first needs it.
        """
        wanted = np.asarray(indices, dtype=np.int64)
        shard_of = self.shard_of(wanted)
        rows = np.empty((wanted.size, self.row_length), dtype=self.manifest.dtype)
        for number in np.unique(shard_of).tolist():
            shard = self._shards[number]
            if shard is None:  # mapped when a row of it is first read
                record = self.manifest.splits[self.split].shards[number]
                shard = self._shards[number] = MappedShard(self.folder, record, self.manifest)
            chosen = shard_of == number
            rows[chosen] = shard.rows(wanted[chosen] - self.starts[number])
        return rows

    def shard_of(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the number of each row's shard; IndexError outside 0..len-1."""
        assert rows.ndim == 1
        if rows.size and (rows.min() < 0 or rows.max() >= len(self)):
            raise IndexError(f"row outside 0..{len(self) - 1} in {self.folder} ({self.split})")
        return np.searchsorted(self.starts, rows, side="right") - 1


def open_shards(folder: Path | str, split: Split = "train") -> ShardSet:
    """Open a split of a finished folder; raise CorpusError if it is unusable.

    Sizes are checked here, content when rows are read; `check` reads all of it at once.
    """
    folder = Path(folder)
    manifest = load_manifest(folder)
    if split not in manifest.splits:
        fix = f"`{split}: FILE`" if manifest.has_labels else "a larger `validation`"
        raise CorpusError(f"{folder}: has no {split} split: prepare it with {fix}")
    return ShardSet(folder, split, manifest)


def read_segments(path: Path) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    """Return the row of each segment that a side table names [S], and which are whole documents.

    All pieces of a document are in one shard: it is whole if its source and id occur there once.
    CorpusError if the table does not decode.
    """
    with decoded(path):
        # Not `pq.read_table` and `to_numpy`, which import pandas: half a second in each process.
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            table = file.read(columns=["row", "source", "document"], use_threads=False)
        table = table.combine_chunks()
        row, source = (np.from_dlpack(table[name].chunk(0)) for name in ("row", "source"))
        document = np.from_dlpack(table["document"].chunk(0).dictionary_encode().indices)
    num_sources = int(np.ptp(source)) + 1
    key = document.astype(np.int64) * num_sources + (source - source.min())
    whole: npt.NDArray[np.bool_] = np.bincount(key)[key] == 1
    return row, whole


def map_texts(path: Path) -> pa.RecordBatch:
    """Map a file of texts into memory; CorpusError if it does not decode."""
    return _map_batch(path, TEXTS)


def map_labels(path: Path) -> pa.RecordBatch:
    """Map the labels of a shard's rows into memory; CorpusError if they do not decode."""
    return _map_batch(path)


def _map_batch(path: Path, schema: pa.Schema | None = None) -> pa.RecordBatch:
    with decoded(path):
        with pa.ipc.open_stream(pa.memory_map(str(path)).read_buffer()) as stream:
            batch = stream.read_next_batch()
        batch.validate()
        if schema is not None and batch.schema != schema:
            raise pa.ArrowInvalid(f"columns {batch.schema.names}")
    return batch


def check_size(folder: Path, record: ShardRecord | FileRecord) -> None:
    """Raise CorpusError unless the file exists with the manifest's size."""
    path = folder / record.file
    if not path.is_file():
        raise CorpusError(f"{path}: missing: {AGAIN}")
    size = path.stat().st_size
    if size != record.bytes:
        raise CorpusError(f"{path}: {size} bytes, the manifest says {record.bytes}: {AGAIN}")


def block_differs(path: Path, record: ShardRecord, block: int) -> str:
    """Return the sentence for a damaged block."""
    start = block * record.block_bytes
    end = min(start + record.block_bytes, record.bytes)
    return f"{path}: block {block} differs from the manifest (bytes {start}-{end}): {AGAIN}"
