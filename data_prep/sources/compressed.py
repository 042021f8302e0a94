"""Decompression in bounded memory that tells a file cut short or damaged from a whole one."""

from __future__ import annotations

import bz2
import gzip
import zlib
from collections.abc import Iterator
from typing import Protocol

import zstandard

CHUNK = 1 << 16
DAMAGED = (EOFError, OSError, zlib.error, zstandard.ZstdError)
_ZSTD_FEED = 512  # bytes fed at once: a zstd block of 4 bytes can hold 128 KiB


class Reader(Protocol):
    """What the decompressors need of a file."""

    def read(self, size: int = -1, /) -> bytes:
        """At most `size` bytes; none at the end."""


class Part:
    """The next `left` bytes of a file, to its end if None."""

    def __init__(self, file: Reader, left: int | None) -> None:
        self._file = file
        self._left = left

    def read(self, size: int = -1, /) -> bytes:
        """At most `size` bytes; none at the end."""
        if self._left is None:
            return self._file.read(size)
        data = self._file.read(self._left if size < 0 else min(size, self._left))
        self._left -= len(data)
        return data


def is_compressed(name: str) -> bool:
    """Return whether a file's name says that it is compressed."""
    return name.endswith((".gz", ".bz2", ".zst"))


def decompressed(raw: Reader, name: str) -> Iterator[bytes]:
    """Yield the content of a file of this name, in chunks; raises one of DAMAGED."""
    if name.endswith(".zst"):
        return _zstd_chunks(raw)
    if name.endswith(".gz"):
        return blocks(gzip.GzipFile(mode="rb", fileobj=raw))  # type: ignore[call-overload]
    if name.endswith(".bz2"):
        return _bz2_chunks(raw)
    return blocks(raw)


def blocks(stream: Reader | gzip.GzipFile, size: int = CHUNK) -> Iterator[bytes]:
    """Yield a stream to its end."""
    while block := stream.read(size):
        yield block


def _bz2_chunks(raw: Reader) -> Iterator[bytes]:
    # Not BZ2File: it takes a damaged stream after a whole one for the end of the file.
    decompressor, feed = bz2.BZ2Decompressor(), b""
    while True:
        if decompressor.eof:
            feed = decompressor.unused_data or raw.read(CHUNK)
            if not feed:
                return
            decompressor = bz2.BZ2Decompressor()
        elif decompressor.needs_input:
            feed = raw.read(CHUNK)
            if not feed:
                raise EOFError("the last bz2 stream has no end")
        if chunk := decompressor.decompress(feed, CHUNK):
            yield chunk
        feed = b""


def _zstd_chunks(raw: Reader) -> Iterator[bytes]:
    # Not stream_reader: it takes a frame that is cut short for the end of the file.
    decompressor = zstandard.ZstdDecompressor().decompressobj()
    while feed := raw.read(_ZSTD_FEED):
        while feed:
            if decompressor.eof:
                decompressor = zstandard.ZstdDecompressor().decompressobj()
            data = decompressor.decompress(feed)
            yield from (data[at : at + CHUNK] for at in range(0, len(data), CHUNK))
            feed = decompressor.unused_data
    if not decompressor.eof:
        raise EOFError("the last zstd frame has no end")
