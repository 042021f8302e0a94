"""Cut one long bz2 stream at its blocks, so that it is read in pieces like any other file.

A bz2 stream is a sequence of blocks of at most 900 kB of text, each with a checksum, that begin at
any bit with the digits of pi; those of its root begin its end, a checksum of all blocks. A block
can be decompressed without those before it once its bits are moved to whole bytes.
"""

from __future__ import annotations

import bz2
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import BinaryIO

import numpy as np

from data_prep import CorpusError
from data_prep.messages import one_line
from data_prep.sources.compressed import CHUNK
from data_prep.sources.files import Piece

_BLOCK, _END = 0x314159265359, 0x177245385090  # 48 bits each
_MASK = (1 << 48) - 1
_END_BITS = 48 + 32  # with the checksum of all blocks
_LONGEST = 8 << 20  # bits: no block of 900 kB of text has more
_READ = 1 << 22  # bytes
FIRST = 32  # the bit of the first block, after the header


@dataclass(frozen=True, slots=True)
class Blocks(Piece):
    """Hold the blocks of a bz2 file that begin in the bits `start` to `end`."""

    def stored_ranges(self) -> list[tuple[int, int | None]]:
        """Return the bytes that hold these bits."""
        return [(self.start // 8, None if self.end is None else -(-self.end // 8))]


def cut_at_blocks(file: Piece, limit: int) -> list[Piece]:
    """Return pieces of at least `limit` bytes; the file whole if it is not one sound stream."""
    bits = 8 * os.path.getsize(file.path)
    end = _end_of(file.path)
    if end is None:
        return [file]
    borders = [FIRST]
    with open(file.path, "rb") as stored:
        for bit, is_end in _marks(stored, 0, bits):
            if is_end and bit != end:
                return [file]  # several streams
            if is_end or bit - borders[-1] < 8 * limit or end - bit < 8 * limit:
                continue
            if _is_block(file.path, bit):  # and no other bits that look like one
                borders.append(bit)
    if len(borders) == 1:
        return [file]
    sizes = [(b - a) // 8 for a, b in pairwise([*borders, bits])]
    ends = [*borders[1:], None]
    return [Blocks(file.path, a, b, size) for a, b, size in zip(borders, ends, sizes, strict=True)]


def chunks(path: str, start: int, end: int | None) -> Iterator[bytes]:
    """Yield the text of the blocks from bit `start` to bit `end` (None: to the stream's end).

    Raises:
        CorpusError: the file is damaged or cut short.
    """
    last = _end_of(path) if end is None else end
    if last is None:
        raise _damaged(path, "its stream has no end")
    stream = bz2.BZ2Decompressor()
    with open(path, "rb") as stored:
        for feed in chain([b"BZh9"], _bits(stored, start, last), [b""]):
            try:
                # More may come without input: it asks for that as soon as it has none left.
                while not stream.eof:
                    text, feed = stream.decompress(feed, CHUNK), b""
                    yield text
                    if not text and stream.needs_input:
                        break
            except OSError as error:
                raise _damaged(path, f"near byte {stored.tell()}: {error}") from None
    if not stream.eof:  # the checksum of all blocks was compared
        raise _damaged(path, "a block has no end")


def _bits(stored: BinaryIO, start: int, last: int) -> Iterator[bytes]:
    """Yield the bits from `start` to `last` as whole bytes, and an end with their checksum."""
    checksum = 0
    for bit, _ in _marks(stored, start, last):
        checksum = (checksum << 1 & 0xFFFFFFFF | checksum >> 31) ^ _number(stored, bit + 48, 32)
    at = start
    while at + 8 <= last:
        stored.seek(at // 8)
        data = stored.read(min(CHUNK, (last - at) // 8) + 1)
        wide = np.frombuffer(data + b"\0", np.uint8).astype(np.uint16)
        size = min(CHUNK, (last - at) // 8)
        moved = wide[:-1] << start % 8 | wide[1:] >> (8 - start % 8)
        yield (moved[:size] & 0xFF).astype(np.uint8).tobytes()
        at += 8 * size
    rest = last - at
    end = (_number(stored, at, rest) << 48 | _END) << 32 | checksum
    unused = -(rest + _END_BITS) % 8
    yield (end << unused).to_bytes((rest + _END_BITS + unused) // 8, "big")


def _number(stored: BinaryIO, bit: int, size: int) -> int:
    """Return `size` bits as a number."""
    stored.seek(bit // 8)
    data = stored.read((bit % 8 + size + 7) // 8)
    return int.from_bytes(data, "big") >> (-(bit + size) % 8) & (1 << size) - 1


def _damaged(path: str, why: str) -> CorpusError:
    return CorpusError(f"{one_line(path)}: damaged ({why}): download or write it again")


def _end_of(path: str) -> int | None:
    """Return the bit at which the end of the last stream begins; None if it has none."""
    size = os.path.getsize(path)
    with open(path, "rb") as stored:
        stored.seek(max(0, size - 11))
        tail = stored.read()
    value = int.from_bytes(tail, "big")
    for unused in range(8):  # bits after the checksum
        if value >> (unused + 32) & _MASK == _END:
            return 8 * size - unused - _END_BITS
    return None


def _marks(stored: BinaryIO, start: int, last: int) -> Iterator[tuple[int, bool]]:
    """Yield (bit, is it an end) of what looks like the begin of a block or an end, in order.

    Only those are named that begin at a bit from `start` on, before `last`.
    """
    # Five of their bytes are whole, wherever in a byte they begin.
    wanted = [
        (value, shift, (value >> shift & (1 << 40) - 1).to_bytes(5, "big"))
        for value in (_BLOCK, _END)
        for shift in range(8)
    ]
    at, held, stop = start // 8, b"", last // 8 + 8
    while at + len(held) < stop:
        stored.seek(at + len(held))
        if not (chunk := stored.read(min(_READ, stop - at - len(held)))):
            return
        data = held + chunk
        found = []
        for value, shift, whole in wanted:
            place = data.find(whole, 1)
            while 0 < place <= len(data) - 6:
                bit = 8 * (at + place - 1) + shift
                around = int.from_bytes(data[place - 1 : place + 6], "big")
                if around >> (8 - shift) & _MASK == value and start <= bit < last:
                    found.append((bit, value == _END))
                place = data.find(whole, place + 1)
        yield from sorted(found)
        held = data[-6:]
        at += len(data) - len(held)


def _is_block(path: str, bit: int) -> bool:
    """Return whether a block that begins there has text."""
    stream = bz2.BZ2Decompressor()
    with open(path, "rb") as stored:
        try:
            stream.decompress(b"BZh9", CHUNK)
            for feed in _bits(stored, bit, min(bit + _LONGEST, 8 * os.path.getsize(path))):
                if stream.decompress(feed, CHUNK):
                    return True
        except OSError:
            pass
    return False
