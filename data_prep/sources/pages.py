"""What a parquet file's footer and page headers tell before any of its text is decompressed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from pyarrow.parquet import FileMetaData

_WINDOW = 1 << 13  # bytes read for a page header; one with long statistics needs more
_HEADER_LIMIT = 1 << 20
_BOOLEANS, _BYTE, _INTEGERS, _DOUBLE, _BINARY, _LISTS, _MAP, _STRUCT = (
    *((1, 2), 3, (4, 5, 6), 7, 8),
    *((9, 10), 11, 12),
)


def largest_page(file: BinaryIO, metadata: FileMetaData, row_group: int, columns: list[str]) -> int:
    """Return the decompressed bytes of the largest page of these columns, as the page headers say.

    Neither the footer's sizes nor the compressed ones bound what a page takes once it is read.
    Raises OSError if a header is damaged.
    """
    largest = 0
    for start, end, name in _column_chunks(metadata, row_group):
        if name.split(".")[0] not in columns:
            continue
        while start < end:
            length, sizes = _page_header(file, start)
            if sizes[0] < 0 or sizes[1] < 0:
                raise OSError(f"a page of negative size at byte {start}")
            largest = max(largest, sizes[0])
            start += length + sizes[1]
    return largest


def _column_chunks(metadata: FileMetaData, row_group: int) -> Iterator[tuple[int, int, str]]:
    """(first byte, last + 1, dotted name) of a row group's columns."""
    group = metadata.row_group(row_group)
    for number in range(group.num_columns):
        column = group.column(number)
        start = column.data_page_offset
        if column.has_dictionary_page and column.dictionary_page_offset:
            start = min(start, column.dictionary_page_offset)
        yield start, start + column.total_compressed_size, column.path_in_schema


def _page_header(file: BinaryIO, start: int) -> tuple[int, tuple[int, int]]:
    """Return the header's length, and the page's size decompressed and as stored."""
    window = _WINDOW
    while True:
        file.seek(start)
        data = file.read(window)
        try:
            fields, end = _struct(data, 0, depth=0)
            return end, (fields[2], fields[3])
        except IndexError:
            if len(data) < window or window >= _HEADER_LIMIT:
                raise OSError(f"no page header at byte {start}") from None
            window *= 8
        except KeyError:
            raise OSError(f"no page header at byte {start}") from None


def _struct(data: bytes, at: int, *, depth: int) -> tuple[dict[int, int], int]:
    """Return the integer fields of a struct in Thrift's compact protocol, and where it ends.

    https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md
    """
    fields: dict[int, int] = {}
    number = 0
    while header := data[at]:
        at += 1
        kind = header & 15
        if header >> 4:
            number += header >> 4
        else:
            value, at = _varint(data, at)
            number = _signed(value)
        if kind in _INTEGERS:
            value, at = _varint(data, at)
            fields[number] = _signed(value)
        elif kind not in _BOOLEANS:  # a boolean field's value is its kind
            at = _skipped(data, at, kind, depth)
    return fields, at + 1


def _skipped(data: bytes, at: int, kind: int, depth: int) -> int:
    """Return where a value ends."""
    if depth > 8:
        raise KeyError("nested")
    if kind == _BYTE or kind in _BOOLEANS:
        return at + 1
    if kind in _INTEGERS:
        return _varint(data, at)[1]
    if kind == _DOUBLE:
        return at + 8
    if kind == _BINARY:
        length, at = _varint(data, at)
        if at + length > len(data):
            raise IndexError
        return at + length
    if kind in _LISTS:
        count, of = data[at] >> 4, data[at] & 15
        at += 1
        if count == 15:
            count, at = _varint(data, at)
        for _ in range(count):
            at = _skipped(data, at, of, depth + 1)
        return at
    if kind == _STRUCT:
        return _struct(data, at, depth=depth + 1)[1]
    raise KeyError(kind)  # maps do not occur in page headers


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise KeyError("varint")


def _signed(zigzag: int) -> int:
    return (zigzag >> 1) ^ -(zigzag & 1)
