"""Convert Arrow columns without pandas, whose import takes pyarrow 0.5 s a process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa


def batch(columns: Iterable[Sequence[Any]], schema: pa.Schema) -> pa.RecordBatch:
    """Return a record batch without nulls; `columns` are in the order of `schema`."""
    arrays = [column(values, field.type) for values, field in zip(columns, schema, strict=True)]
    return pa.record_batch(arrays, schema=schema)


def column(values: Sequence[Any] | npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    """Return one column of numbers, strings, or bytes of one width."""
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        data = [value.encode() for value in values]
        width = np.int32 if pa.types.is_string(kind) else np.int64
        offsets = np.zeros(len(data) + 1, dtype=np.int64)
        np.cumsum([len(value) for value in data], out=offsets[1:])
        assert offsets[-1] <= np.iinfo(width).max
        buffers = [None, pa.py_buffer(offsets.astype(width)), pa.py_buffer(b"".join(data))]
    elif pa.types.is_fixed_size_binary(kind):
        buffers = [None, pa.py_buffer(b"".join(values))]
    else:
        buffers = [None, pa.py_buffer(np.asarray(values, dtype=_dtype(kind)))]
    return pa.Array.from_buffers(kind, len(values), buffers)


def fixed_width(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    """Return a column of numbers, or of bytes of one width, without nulls."""
    kind = column.type
    dtype = _dtype(kind)
    parts = [np.empty(0, dtype=dtype)]
    for chunk in column.chunks:
        values = np.frombuffer(chunk.buffers()[1], dtype=dtype)
        parts.append(values[chunk.offset : chunk.offset + len(chunk)])
    return np.concatenate(parts)


def _dtype(kind: pa.DataType) -> np.dtype[Any]:
    # The type's own `to_pandas_dtype` imports pandas where pyarrow is older than 26.
    if pa.types.is_fixed_size_binary(kind):
        letter = "V"
    elif pa.types.is_floating(kind):
        letter = "f"
    else:
        letter = "u" if pa.types.is_unsigned_integer(kind) else "i"
    return np.dtype(f"{letter}{kind.byte_width}")
