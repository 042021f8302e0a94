"""Read the indexes of multistream dumps: the offset of each bz2 stream of 100 pages."""

from __future__ import annotations

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
_STREAM = re.compile(rb"BZh[1-9]1AY&SY")  # a header and the magic of a block, the digits of pi


def stream_ranges(file: Piece, limit: int) -> list[Piece]:
    """Divide a dump into pieces of at least `limit` bytes, each beginning with a bz2 stream.

    Returns none if there is no index next to it. Raises CorpusError if the index does not fit it.
    """
    if not (name := _DUMP.fullmatch(file.path)):
        return []
    index = f"{name[1]}-index{name[2]}.txt{name[3] or ''}.bz2"
    if not (remote.exists(index) if remote.is_remote(index) else os.path.isfile(index)):
        return []
    if file.size <= limit:
        return [file]
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
    pieces = [Piece(file.path, a, b, b - a) for a, b in pairwise(borders)]
    return [*pieces, Piece(file.path, borders[-1], None, file.size - borders[-1])]
