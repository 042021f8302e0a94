"""Write shards atomically, and describe files for a manifest."""

from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from data_prep.disk import hash_file, write_file
from data_prep.shards.manifest import BLOCK_BYTES, FileRecord, ShardRecord

TEXTS = pa.schema({"row": pa.int32(), "text": pa.large_string()})  # an entry for each segment


def write_shard(path: Path, rows: npt.NDArray[Any], pad: int) -> ShardRecord:
    """Write rows [n, row_length] of uint16 or uint32 ids as one Arrow stream."""
    assert rows.ndim == 2 and len(rows) and rows.dtype in (np.uint16, np.uint32)
    # Not pa.array, which imports pandas: half a second in each process.
    buffers = [None, pa.py_buffer(np.ascontiguousarray(rows))]
    values = pa.Array.from_buffers(pa.from_numpy_dtype(rows.dtype), rows.size, buffers)
    column = pa.FixedSizeListArray.from_arrays(values, rows.shape[1])
    batch = pa.record_batch([column], names=["input_ids"])
    write_batch(path, batch)
    sha256, size = hash_file(path)
    return ShardRecord(
        file=path.name,
        rows=len(rows),
        tokens=int(np.count_nonzero(rows != pad)),
        bytes=size,
        sha256=sha256,
        blocks=hash_blocks(path),
    )


def write_texts(path: Path, rows: Sequence[int], texts: Sequence[str | None]) -> None:
    """Write the row of each segment, and its text or None, as one Arrow stream."""
    data = [b"" if text is None else text.encode() for text in texts]
    offsets = np.zeros(len(data) + 1, dtype=np.int64)
    np.cumsum([len(text) for text in data], out=offsets[1:])
    # Bit n of the first buffer says that there is an entry n.
    valid = np.packbits([text is not None for text in texts], bitorder="little")
    buffers = [pa.py_buffer(buffer) for buffer in (valid, offsets, b"".join(data))]
    column = pa.Array.from_buffers(pa.large_string(), len(data), buffers)
    numbers = [None, pa.py_buffer(np.asarray(rows, dtype=np.int32))]
    row = pa.Array.from_buffers(pa.int32(), len(rows), numbers)
    write_batch(path, pa.record_batch([row, column], schema=TEXTS))


def write_batch(path: Path, batch: pa.RecordBatch) -> None:
    """Write an Arrow stream of one batch, whose columns are then mapped as a whole."""

    def write(file: IO[bytes]) -> None:
        with pa.ipc.new_stream(file, batch.schema) as stream:
            stream.write_batch(batch)

    write_file(path, write)


def file_record(folder: Path, name: str) -> FileRecord:
    """Describe a finished file for the manifest."""
    sha256, size = hash_file(folder / name)
    return FileRecord(file=name, bytes=size, sha256=sha256)


def hash_blocks(path: Path) -> tuple[str, ...]:
    """Return the xxh3-128 of each block of a file: 20 times faster than sha256, but no defence
    against forgery."""
    with path.open("rb") as file:
        blocks = iter(lambda: file.read(BLOCK_BYTES), b"")
        return tuple(xxhash.xxh3_128_hexdigest(block) for block in blocks)
