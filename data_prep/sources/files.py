"""Finding input files, and reading them, plain or compressed, in bounded memory."""

from __future__ import annotations

import bz2
import glob
import gzip
import os
import zlib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import BinaryIO

import zstandard

from data_prep import CorpusError

CHUNK = 1 << 16
LINE_LIMIT = 1 << 26  # bytes; a compressed file of a few kB can hold a line of many GB
_ZSTD_FEED = 512  # bytes fed at once: a zstd block of 4 bytes can hold 128 KiB
_DAMAGED = (EOFError, OSError, zlib.error, zstandard.ZstdError)


def list_files(path: str, patterns: tuple[str, ...]) -> list[str]:
    """A file, a folder's files whose names fit a pattern, or a glob's files; sorted.

    Folders are searched recursively and hidden files skipped. Raises CorpusError if none is found.
    """
    if os.path.isfile(path):
        return [path]
    if os.path.isdir(path):
        found = [
            os.path.join(folder, name)
            for folder, _, names in os.walk(path)
            for name in names
            if _visible(os.path.relpath(os.path.join(folder, name), path))
            and any(fnmatch(name.lower(), pattern) for pattern in patterns)
        ]
        wanted = " or ".join(patterns)
        problem = f"{path}: no file named {wanted} in this folder; a glob takes any name"
    else:
        found = [name for name in glob.glob(path, recursive=True) if os.path.isfile(name)]
        problem = f"{path}: no such file or folder; check the path of this source"
    if not found:
        raise CorpusError(problem)
    return sorted(found)


def relative_name(path: str, input: str) -> str:
    """The input's name within the source's path, with forward slashes: the stem of ids."""
    root = Path(path)
    if not root.is_dir():
        parts = root.parts
        wild = [i for i, part in enumerate(parts) if glob.has_magic(part)]
        # `a/*/b.txt` is relative to `a`; a plain file to its folder.
        first = wild[0] if wild and not root.exists() else len(parts) - 1
        root = Path(*parts[:first])
    return Path(os.path.relpath(input, root)).as_posix()


def chunks(path: str) -> Iterator[bytes]:
    """The decompressed bytes of a file, in chunks of bounded size.

    Raises CorpusError if the file is unreadable, damaged or cut short.
    """
    try:
        with open(path, "rb") as raw:
            if path.endswith(".zst"):
                yield from _zstd_chunks(raw)
            elif path.endswith(".gz"):
                yield from _stream_chunks(gzip.GzipFile(fileobj=raw))
            elif path.endswith(".bz2"):
                yield from _stream_chunks(bz2.BZ2File(raw))
            else:
                yield from _stream_chunks(raw)
    except _DAMAGED as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise CorpusError(f"{path}: cannot be read: {error.strerror}") from error
        raise CorpusError(
            f"{path}: cut short or damaged ({error}); download or write it again"
        ) from error


def lines(path: str) -> Iterator[tuple[int, bytes | None]]:
    r"""(line number from 1, line without its \n or \r\n); None for a line over LINE_LIMIT bytes.

    Only b"\n" ends a line: U+2028 and its like are part of the text.
    """
    number, size = 1, 0
    held: list[bytes] = []
    for chunk in chunks(path):
        pieces = chunk.split(b"\n")
        for i, piece in enumerate(pieces):
            size += len(piece)
            if size <= LINE_LIMIT:
                held.append(piece)
            if i < len(pieces) - 1:
                yield number, _joined(held, size)
                number, held, size = number + 1, [], 0
    if size:
        yield number, _joined(held, size)


def _joined(held: list[bytes], size: int) -> bytes | None:
    return b"".join(held).removesuffix(b"\r") if size <= LINE_LIMIT else None


def _visible(relative: str) -> bool:
    return not any(part.startswith(".") for part in Path(relative).parts)


def _stream_chunks(stream: BinaryIO | gzip.GzipFile | bz2.BZ2File) -> Iterator[bytes]:
    while chunk := stream.read(CHUNK):
        yield chunk


def _zstd_chunks(raw: BinaryIO) -> Iterator[bytes]:
    # Not stream_reader: it takes a frame that is cut short for the end of the file.
    decompressor = zstandard.ZstdDecompressor().decompressobj()
    while feed := raw.read(_ZSTD_FEED):
        while feed:
            if decompressor.eof:
                decompressor = zstandard.ZstdDecompressor().decompressobj()
            if chunk := decompressor.decompress(feed):
                yield chunk
            feed = decompressor.unused_data
    if not decompressor.eof:
        raise EOFError("the last zstd frame has no end")
