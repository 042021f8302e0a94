"""Finding input files, and reading them, plain or compressed, in bounded memory."""

from __future__ import annotations

import glob
import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path, PurePath, PurePosixPath
from typing import BinaryIO

from data_prep import CorpusError
from data_prep.sources import remote
from data_prep.sources.compressed import DAMAGED, Part, blocks, decompressed, is_compressed
from data_prep.sources.document import Piece
from data_prep.sources.remote import shown

LINE_LIMIT = 1 << 24  # bytes; a compressed file of a few kB can hold a line of many GB
LONG_LINE = f"a line of more than {LINE_LIMIT >> 20} MiB"


def whole(path: str, patterns: tuple[str, ...]) -> list[Piece]:
    """One piece a file: of a file, of a folder's files that fit a pattern, or of a glob's; sorted.

    Folders are searched recursively and hidden files skipped. Raises CorpusError if none is found.
    """
    if remote.is_remote(path):
        return [Piece(url, size=size) for url, size in remote.listed(path, patterns)]
    try:
        return [Piece(name, size=os.path.getsize(name)) for name in _found(path, patterns)]
    except OSError as error:
        raise CorpusError(f"{error.filename}: cannot be read: {error.strerror}") from error


def list_files(path: str, patterns: tuple[str, ...]) -> list[str]:
    """Return the paths of `whole`'s pieces."""
    return [piece.path for piece in whole(path, patterns)]


def cut(piece: Piece, limit: int) -> list[Piece]:
    """Cut a whole file into ranges of `limit` bytes; a compressed one stays whole."""
    if piece.size <= limit or is_compressed(_file_name(piece.path)):
        return [piece]
    if not local(piece.path) and not remote.takes_ranges(piece.path):
        return [piece]
    borders = [*range(0, piece.size, limit), piece.size]
    pieces = [Piece(piece.path, a, b, b - a) for a, b in pairwise(borders)]
    return [*pieces[:-1], replace(pieces[-1], end=None)]


def local(path: str) -> bool:
    """Return whether a path lies in this machine's file system, as far as its form says."""
    return not remote.is_remote(path)


def relative_name(path: str, input: str) -> str:
    """Return the input's name within the source's path, with forward slashes: the stem of ids."""
    if remote.is_remote(path):
        root: PurePath = PurePosixPath(remote.bare(path))
        file: PurePath = PurePosixPath(remote.bare(input))
    else:
        root, file = PurePath(path), PurePath(input)
    if file == root:
        root = file.parent
    elif not file.is_relative_to(root):
        # `a/*/b.txt` is relative to `a`.
        wild = [i for i, part in enumerate(root.parts) if glob.has_magic(part)]
        root = type(root)(*root.parts[: wild[0]]) if wild else root.parent
    name = file.relative_to(root) if file.is_relative_to(root) else PurePath(file.name)
    return name.as_posix().encode("utf-8", "backslashreplace").decode()  # names may be any bytes


def version(path: str) -> str:
    """Return times and size of a file, or what a store says of its state; "" if it says nothing.

    Equal versions mean that a file has not changed, but "" means nothing: compare `sha256`.
    """
    if remote.is_remote(path):
        return remote.version(path)
    if not os.path.isfile(path):
        return ""
    status = os.stat(path)
    # The second time cannot be set: a copy that keeps the first, of equal size, is noticed.
    return f"{status.st_mtime_ns}-{status.st_ctime_ns}-{status.st_size}"


def sha256(piece: Piece) -> str:
    """Return the hash of a piece's bytes as stored; "" of what is not there.

    Of the row groups of a parquet file: of its footer, and of the columns of these row groups.
    """
    if not remote.is_remote(piece.path) and not os.path.isfile(piece.path):
        return ""
    digest = hashlib.sha256()
    for start, end in _stored_ranges(piece):
        for block in _stored(piece.path, start, end):
            digest.update(block)
    return digest.hexdigest()


def state_of_folder(folder: str, paths: Iterable[str], state: Callable[[str], str]) -> str:
    """Hash the names of a folder's files together with the `state` of each."""
    states = sorted((os.path.relpath(path, folder), state(path)) for path in paths)
    return hashlib.sha256(repr(states).encode()).hexdigest() if states else ""


def opened(path: str, start: int = 0, *, seekable: bool = False) -> BinaryIO:
    """Return a file for reading from byte `start` on; CorpusError if it cannot be."""
    if remote.is_remote(path):
        return remote.opened(path, start, seekable=seekable)
    try:
        file = open(path, "rb")  # noqa: SIM115  (the caller closes it)
        file.seek(start)
        return file
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read: {error.strerror}") from error


def chunks(path: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file's stored bytes `start` to `end`, in bounded chunks.

    Raises CorpusError if the file is unreadable, damaged or cut short.
    """
    with opened(path, start) as file:
        part = Part(file, None if end is None else end - start)
        try:
            yield from decompressed(part, _file_name(path))
        except Exception as error:
            raise _unreadable(path, error) from (error if local(path) else None)


def lines(
    path: str, start: int = 0, end: int | None = None, *, on: bool = False
) -> Iterator[tuple[int, bytes | None]]:
    r"""(offset, line without its \n or \r\n) of the lines that begin in decompressed [start, end).

    Only b"\n" ends a line: U+2028 and its like are part of the text. A byte order mark at the
    file's start is left out. None for a line over LINE_LIMIT bytes. With `start` or `end` the
    file must be plain. With `on`, all lines after `end` follow too, if any begins before it.
    """
    # A line begins at `start` if the byte before it ends one.
    offset, size = max(start - 1, 0), 0
    inside = start == 0  # else the first line begins before `start` and is another piece's
    held: list[bytes] = []
    for chunk in chunks(path, offset):
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
            held.clear()
    if inside and size:
        yield offset, _joined(held, size, offset)


def _unreadable(path: str, error: Exception) -> Exception:
    if isinstance(error, OSError) and error.errno is not None and local(path):
        return CorpusError(f"{path}: cannot be read: {error.strerror}")
    if isinstance(error, DAMAGED) and is_compressed(_file_name(path)):
        reason = shown(str(error))
        return CorpusError(
            f"{shown(path)}: cut short or damaged ({reason}); download or write it again"
        )
    return error if local(path) else remote.failed(path, error)


def _joined(held: list[bytes], size: int, offset: int) -> bytes | None:
    if size > LINE_LIMIT:
        return None
    line = b"".join(held).removesuffix(b"\r")
    return line.removeprefix(b"\xef\xbb\xbf") if offset == 0 else line


def _found(path: str, patterns: tuple[str, ...]) -> list[str]:
    if os.path.isfile(path):
        return [path]
    if os.path.isdir(path):
        found = [
            os.path.join(folder, name)
            for folder, _, names in os.walk(path, onerror=_refuse)
            for name in names
            if _visible(os.path.relpath(os.path.join(folder, name), path))
            and any(fnmatch(name.lower(), pattern) for pattern in patterns)
            and stat.S_ISREG(os.stat(os.path.join(folder, name)).st_mode)  # a pipe would block
        ]
        wanted = " or ".join(patterns)
        problem = f"{path}: no file named {wanted} in this folder; a glob takes any name"
    else:
        matches = glob.glob(path, recursive=True)
        found = [name for name in matches if stat.S_ISREG(os.stat(name).st_mode)]
        problem = f"{path}: no such file or folder; check the path of this source"
    if not found:
        raise CorpusError(problem)
    return sorted(found)


def _refuse(error: OSError) -> None:
    raise error  # os.walk would leave the folder out


def _visible(relative: str) -> bool:
    return not any(part.startswith(".") for part in Path(relative).parts)


def _file_name(path: str) -> str:
    return PurePath(remote.bare(path) if remote.is_remote(path) else path).name


def _stored(path: str, start: int, end: int | None) -> Iterator[bytes]:
    with opened(path, start) as file:
        try:
            yield from blocks(Part(file, None if end is None else end - start))
        except Exception as error:
            raise _unreadable(path, error) from (error if local(path) else None)


def _stored_ranges(piece: Piece) -> list[tuple[int, int | None]]:
    if _is_parquet(piece.path):
        from data_prep.sources import pages

        return list(pages.stored_ranges(piece))
    return [(piece.start, piece.end)]


def _is_parquet(path: str) -> bool:
    with opened(path) as file:
        return file.read(4) == b"PAR1"
