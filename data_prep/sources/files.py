"""Find input files, and read them, plain or compressed, in bounded memory.

A damaged or truncated file is recognised.
"""

from __future__ import annotations

import bz2
import glob
import gzip
import hashlib
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path, PurePath
from typing import IO, BinaryIO, ClassVar

from data_prep import CorpusError
from data_prep.messages import error_line, one_line
from data_prep.sources import remote

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


LINE_LIMIT = 1 << 24  # bytes; a compressed file of a few kB can hold a line of many GB
LONG_LINE = f"a line of more than {LINE_LIMIT >> 20} MiB"


@dataclass(frozen=True, slots=True)
class Piece:
    """Hold a file or a part of one: bytes `start` to `end` as stored (None: the file's end).

    `size` is its bytes, for planning. A kind whose inputs are no ranges of bytes has a subclass.
    """

    crossed: ClassVar[bool] = True  # a document may begin in one part of a file and end in the next

    path: str
    start: int = 0
    end: int | None = None
    size: int = 0

    @property
    def reads_beyond(self) -> bool:
        """Return whether documents of the piece depend on bytes of the file outside of it."""
        return self.crossed and (self.start > 0 or self.end is not None)

    @property
    def is_listed(self) -> bool:
        """Return False of a commit whose files are not known now: it can only be compared."""
        return True

    def version(self) -> str:
        """Return times and size of the file, or the store's description of its state; else "".

        Equal versions mean that the file has not changed, but "" means nothing: compare `sha256`.
        """
        if remote.is_remote(self.path):
            return remote.version(self.path)
        try:
            status = os.stat(self.path)
        except (OSError, ValueError):
            return ""
        if not stat.S_ISREG(status.st_mode):
            return ""
        # Programs can set the first time but not the second: it shows a copy of equal size.
        return f"{status.st_mtime_ns}-{status.st_ctime_ns}-{status.st_size}"

    def sha256(self) -> str:
        """Return the hash of the piece's bytes as stored; "" if the file is missing."""
        if not remote.is_remote(self.path) and not os.path.isfile(self.path):
            return ""
        digest = hashlib.sha256()
        for start, end in self.stored_ranges():
            for block in file_chunks(self.path, start, end, stored=True):
                digest.update(block)
        return digest.hexdigest()

    def stored_ranges(self) -> list[tuple[int, int | None]]:
        """Return the ranges of the file's bytes that identify the piece."""
        return [(self.start, self.end)]


def state_of_folder(
    folder: str | Path, paths: Iterable[str | Path], state: Callable[[Piece], str]
) -> str:
    """Hash the names of a folder's files together with the `state` of each; "" without files."""
    states = sorted((os.path.relpath(path, folder), state(Piece(str(path)))) for path in paths)
    return hashlib.sha256(repr(states).encode()).hexdigest() if states else ""


def find_files(path: str, patterns: tuple[str, ...]) -> list[Piece]:
    """Return a file, a folder's files that fit a pattern, or a glob's files; sorted, each whole.

    Folders are searched recursively and hidden files skipped. Raises CorpusError if none is found.
    """
    if remote.is_remote(path):
        return [Piece(url, size=size) for url, size in remote.listed(path, patterns)]

    def refuse(error: OSError) -> None:
        raise error  # os.walk would leave the folder out

    try:
        if os.path.isfile(path):
            found = [path]
        elif os.path.isdir(path):
            found = [
                os.path.join(folder, name)
                for folder, _, names in os.walk(path, onerror=refuse)
                for name in names
                if not any(
                    part.startswith(".")
                    for part in PurePath(os.path.relpath(os.path.join(folder, name), path)).parts
                )
                and any(fnmatch(name.lower(), pattern) for pattern in patterns)
            ]
            problem = f"no file named {' or '.join(patterns)} in this folder; a glob takes any name"
        else:
            found = glob.glob(path, recursive=True)
            problem = "no such file or folder; check the path of this source"
        # Opening a pipe would block.
        found = [name for name in found if stat.S_ISREG(os.stat(name).st_mode)]
        if not found:
            raise CorpusError(f"{path}: {problem}")
        return [Piece(name, size=os.path.getsize(name)) for name in sorted(found)]
    except OSError as error:
        raise CorpusError(f"{error.filename}: cannot be read: {error.strerror}") from error


def byte_ranges(piece: Piece, limit: int) -> list[Piece]:
    """Divide a whole file into ranges of `limit` bytes; a compressed one stays whole."""
    is_remote = remote.is_remote(piece.path)
    if piece.size <= limit or is_compressed(remote.bare(piece.path) if is_remote else piece.path):
        return [piece]
    if is_remote and not remote.takes_ranges(piece.path):
        return [piece]
    borders = [*range(0, piece.size, limit), piece.size]
    ranges = [Piece(piece.path, a, b, b - a) for a, b in pairwise(borders)]
    return [*ranges[:-1], replace(ranges[-1], end=None)]


def opened(
    path: str, start: int = 0, end: int | None = None, *, seekable: bool = False
) -> BinaryIO:
    """Return a file for reading from byte `start` to about `end`; CorpusError if it cannot be."""
    if remote.is_remote(path):
        return remote.opened(path, start, end, seekable=seekable)
    try:
        file = open(path, "rb")  # noqa: SIM115  (the caller closes it)
        file.seek(start)
        return file
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read: {error.strerror}") from error


def file_chunks(
    path: str,
    start: int = 0,
    end: int | None = None,
    *,
    stored: bool = False,
    about: int | None = None,
) -> Iterator[bytes]:
    """Yield a file's stored bytes `start` to `end`, decompressed unless `stored`, in small chunks.

    Where no end is given, `about` says up to where they will be taken: a store is asked for no more
    at once. Raises CorpusError if the file is unreadable, damaged or cut short.
    """
    is_local = not remote.is_remote(path)
    name = path if is_local else remote.bare(path)
    with opened(path, start, about if end is None else end) as file:
        left = None if end is None else end - start
        try:
            yield from blocks(file, left) if stored else decompressed(file, name, left)
        except Exception as error:
            # The cause of a remote error may hold a signed URL.
            cause = error if is_local else None
            if isinstance(error, OSError) and error.errno is not None and is_local:
                raise CorpusError(f"{path}: cannot be read: {error.strerror}") from cause
            if isinstance(error, DAMAGED) and is_compressed(name):
                raise CorpusError(
                    f"{one_line(path)}: cut short or damaged ({error_line(error)}); download or "
                    "write it again"
                ) from cause
            if is_local:
                raise
            raise remote.failed(path, error) from None


def lines(
    path: str, start: int = 0, end: int | None = None, *, on: bool = False
) -> Iterator[tuple[int, bytes | None]]:
    r"""Yield (offset, line without \n or \r\n) of lines that begin in decompressed [start, end).

    Only b"\n" ends a line: U+2028 and its like are part of the text. A byte order mark at the
    file's start is left out. None stands for a line over LINE_LIMIT bytes. With `start` or `end`
    the file must be plain. With `on`, all lines after `end` follow too, if any begins before it.
    """
    # Reading begins one byte early: a line begins at `start` if the byte before it ends one.
    offset, size = max(start - 1, 0), 0
    inside = start == 0  # else the first line begins before `start` and is another piece's
    held: list[bytes] = []
    for chunk in file_chunks(path, offset, about=end):
        *ended, rest = chunk.split(b"\n")
        for part in ended:
            size += len(part)
            if inside:
                if size <= LINE_LIMIT:
                    held.append(part)
                yield offset, _joined(held, size, offset)
            offset += size + 1
            if end is not None and offset >= end and not (on and inside):
                return
            inside, held, size = True, [], 0
        size += len(rest)
        if not inside and end is not None and offset + size >= end:
            return  # no line begins in here
        if inside and size <= LINE_LIMIT:
            held.append(rest)
        else:
            held.clear()  # a line that is too long is only counted, not held
    if inside and size:
        yield offset, _joined(held, size, offset)


def _joined(held: list[bytes], size: int, offset: int) -> bytes | None:
    if size > LINE_LIMIT:
        return None
    line = b"".join(held).removesuffix(b"\r")
    return line.removeprefix(b"\xef\xbb\xbf") if offset == 0 else line
