"""Find the bz2 streams of multistream dumps, of 100 pages each: by the index, or by a scan."""

from __future__ import annotations

import bz2
import os
import re
from itertools import pairwise

from data_prep import CorpusError
from data_prep.messages import one_line
from data_prep.sources import remote
from data_prep.sources.files import Piece, lines, opened

FIX = "download dump and index again, or remove the index"
_DUMP = re.compile(r"(.*-multistream)(\d*)\.xml(-p\d+p\d+)?\.bz2")
INDEX = re.compile(r".*-multistream-index\d*\.txt(-p\d+p\d+)?(\.bz2)?")
_MAGIC, _PAGE = 10, 64  # bytes of a stream's begin, and of text that shows what it begins with
_NO_SECOND = 1 << 25  # bytes without another stream
_STREAM = re.compile(rb"BZh[1-9]1AY&SY")  # a header and the magic of a block, the digits of pi


def stream_ranges(file: Piece, limit: int) -> list[Piece]:
    """Divide a dump into pieces of at least `limit` bytes, each beginning with a bz2 stream.

    Returns none if it has one stream, or if there is no index next to one in a store, which would
    move twice. Raises CorpusError if the index does not fit the dump.
    """
    index = index_of(file)
    if index and file.size <= limit:
        return [file]
    if index:
        return _pieces(file, _by_index(file, index, limit))
    if file.size <= limit or remote.is_remote(file.path) or not file.path.endswith(".bz2"):
        return []
    return _pieces(file, _by_scan(file, limit))


def index_of(file: Piece) -> str:
    """Return the path of the index next to a dump; "" without one."""
    if not (name := _DUMP.fullmatch(file.path)):
        return ""
    index = f"{name[1]}-index{name[2]}.txt{name[3] or ''}.bz2"
    there = remote.exists(index) if remote.is_remote(index) else os.path.isfile(index)
    return index if there else ""


def _pieces(file: Piece, borders: list[int]) -> list[Piece]:
    if not borders:
        return []
    pieces = [Piece(file.path, a, b, b - a) for a, b in pairwise(borders)]
    return [*pieces, Piece(file.path, borders[-1], None, file.size - borders[-1])]


def _by_scan(file: Piece, limit: int) -> list[int]:
    """Return where pieces begin, at streams that begin with a page; none of a single stream.

    Other programs' streams (pbzip2) begin anywhere in a page. 32 MiB without a second stream that
    does not count as a dump of one.
    """
    borders, at, held = [0], 0, b""
    with open(file.path, "rb") as stored:
        while chunk := stored.read(1 << 20):
            data = held + chunk
            for found in _STREAM.finditer(data):
                place = at + found.start()
                if place - borders[-1] < limit:
                    continue
                if not _begins_with_page(file.path, place):
                    return []
                borders.append(place)
            held = data[-_MAGIC + 1 :]
            at += len(data) - len(held)
            if len(borders) == 1 and at > limit + _NO_SECOND:
                break
    return borders if len(borders) > 1 else []


def _begins_with_page(path: str, at: int) -> bool:
    """Return whether the text of a stream begins with a page; the dump's end has none."""
    stream, text = bz2.BZ2Decompressor(), b""
    with open(path, "rb") as stored:
        stored.seek(at)
        try:
            while len(text) < _PAGE and not stream.eof:
                feed = stored.read(1 << 16) if stream.needs_input else b""
                if stream.needs_input and not feed:
                    return False
                text += stream.decompress(feed, _PAGE)
        except OSError:
            return False
    return text.lstrip().startswith((b"<page>", b"</mediawiki>"))


def _by_index(file: Piece, index: str, limit: int) -> list[int]:
    """Return where pieces begin, by the index; CorpusError if it does not fit the dump."""
    borders = [0]
    last = 0
    for at, line in lines(index):  # offset:page id:title
        number = (line or b"").split(b":", 1)[0]
        if not number.isdigit() or len(number) > 18:
            raise CorpusError(f"{one_line(index)}: no index of a dump (at byte {at}): {FIX}")
        offset = int(number)
        if offset < last:
            raise CorpusError(f"{one_line(index)}: {offset} comes after {last}: {FIX}")
        if offset >= file.size:
            raise CorpusError(
                f"{one_line(index)}: byte {offset} lies beyond the dump's {file.size} bytes: {FIX}"
            )
        last = offset
        if last - borders[-1] >= limit:
            borders.append(last)
    if last == 0:
        raise CorpusError(f"{one_line(index)}: names no page: {FIX}")
    with opened(file.path, seekable=True) as stored:
        for offset in [*borders[1:], last]:
            stored.seek(offset)
            if not _STREAM.match(stored.read(10)):
                raise CorpusError(
                    f"{one_line(index)}: no bz2 stream begins at byte {offset} of the dump: {FIX}"
                )
    return borders
