"""Decompress in bounded memory, and recognise a damaged or truncated file."""

from __future__ import annotations

import bz2
import gzip
import zlib
from collections.abc import Iterator
from typing import IO

CHUNK = 1 << 16
DAMAGED = (EOFError, OSError, zlib.error)
_ZSTD_FEED = 512  # bytes fed at once: a zstd block of 4 bytes can hold 128 KiB


def is_compressed(name: str) -> bool:
    """Return whether a file's name has the ending of a compressed file."""
    return name.endswith((".gz", ".bz2", ".zst"))


def blocks(
    file: IO[bytes] | gzip.GzipFile, left: int | None = None, size: int = CHUNK
) -> Iterator[bytes]:
    """Yield the next `left` bytes of a file (None: all) in blocks of at most `size`."""
    while block := file.read(size if left is None else min(size, left)):
        yield block
        left = None if left is None else left - len(block)


def decompressed(file: IO[bytes], name: str, left: int | None = None) -> Iterator[bytes]:
    """Yield the content of a file of this name, in chunks; raises one of DAMAGED.

    `left` bounds the bytes as stored that are read (None: to the file's end).
    """
    if name.endswith(".zst"):
        import zstandard  # here, because few corpora need it

        # Not stream_reader: it takes a frame that is cut short for the end of the file.
        frame = zstandard.ZstdDecompressor().decompressobj()
        for feed in blocks(file, left, _ZSTD_FEED):
            while feed:
                if frame.eof:
                    frame = zstandard.ZstdDecompressor().decompressobj()
                try:
                    data = frame.decompress(feed)
                except zstandard.ZstdError as error:
                    raise OSError(str(error)) from error
                yield from (data[at : at + CHUNK] for at in range(0, len(data), CHUNK))
                feed = frame.unused_data
        if not frame.eof:
            raise EOFError("the last zstd frame has no end")
    elif name.endswith(".bz2"):
        # Not BZ2File: it takes a damaged stream after a whole one for the end of the file.
        stored = blocks(file, left)
        stream, feed = bz2.BZ2Decompressor(), b""
        while True:
            if stream.eof:
                feed = stream.unused_data or next(stored, b"")
                if not feed:
                    return
                stream = bz2.BZ2Decompressor()
            elif stream.needs_input:
                feed = next(stored, b"")
                if not feed:
                    raise EOFError("the last bz2 stream has no end")
            if chunk := stream.decompress(feed, CHUNK):
                yield chunk
            feed = b""
    elif name.endswith(".gz"):
        assert left is None
        yield from blocks(gzip.GzipFile(mode="rb", fileobj=file))
    else:
        yield from blocks(file, left)
