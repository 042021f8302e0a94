"""Read parts of remote files: in blocks that are kept a while, and again where a store fails."""

from __future__ import annotations

import io
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

Value = TypeVar("Value")
BLOCK = 1 << 18  # bytes
AT_ONCE = 16  # blocks of a request
KEPT = 64  # blocks: a piece is read twice, for its hash and for its documents
PAUSES = (0.5, 2.0, 8.0, 32.0)  # seconds before each further attempt
_FOR_GOOD = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
_kept: OrderedDict[tuple[str, int], bytes] = OrderedDict()  # kept for this process


class Ranges(io.RawIOBase):
    """Read a remote file of `size` bytes from `start` on.

    A request is for what is asked for, or what lies before `end`, and for more from block to block
    that is read in order.

    Args:
        fetch: returns the bytes from one place to another.
        state: of the file, by which blocks are kept; "" if it is not known, and none are.
        size: of the file.
        start: where reading begins.
        end: up to where it will be read; 0 if that is not known.
    """

    def __init__(
        self, fetch: Callable[[int, int], bytes], state: str, size: int, start: int, end: int
    ) -> None:
        self._fetch, self._state, self._size = fetch, state, size
        self._at, self._end = start, min(end, size)
        self._own: dict[int, bytes] = {}  # the blocks of the last request
        self._after, self._ahead = -1, 0  # the block after it, and how many were asked for

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the place of the next byte."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place; return it."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next `size` bytes (None or -1: all); fewer at the end of the file only."""
        stop = self._size if size is None or size < 0 else min(self._size, self._at + size)
        parts = []
        while self._at < stop:
            number, within = divmod(self._at, BLOCK)
            part = self._block(number, stop)[within : within + stop - self._at]
            self._at += len(part)
            parts.append(part)
        return b"".join(parts)

    def _block(self, number: int, stop: int) -> bytes:
        """Return a block; `stop` is where the bytes that are asked for end."""
        if (found := self._own.get(number)) is not None:
            return found
        key = (self._state, number)
        if self._state and key in _kept:
            _kept.move_to_end(key)
            return _kept[key]
        self._ahead = min(AT_ONCE, 2 * self._ahead) if number == self._after else 1
        wanted = -(-max(stop, self._end) // BLOCK) - number  # blocks
        last = number + max(1, min(AT_ONCE, max(wanted, 0 if self._end else self._ahead)))
        first, last = number, min(last, -(-self._size // BLOCK))
        while last > first + 1 and self._state and (self._state, last - 1) in _kept:
            last -= 1
        data = again(lambda: self._fetch(first * BLOCK, min(last * BLOCK, self._size)))
        self._own = {first + i: data[i * BLOCK : (i + 1) * BLOCK] for i in range(last - first)}
        self._after, self._ahead = last, last - first
        if self._state:
            for each, block in self._own.items():
                _kept[self._state, each] = block
            while len(_kept) > KEPT:
                _kept.popitem(last=False)
        return self._own[number]


def again(work: Callable[[], Value]) -> Value:
    """Call what a store or a network may refuse for a while; what is missing or closed is final."""
    for pause in PAUSES:
        try:
            return work()
        except Exception as error:  # each driver has errors of its own
            # fsspec calls a file missing that an HTTP server did not send for any reason.
            status = getattr(error, "status", getattr(error.__cause__, "status", None))
            if isinstance(status, int):
                final = 400 <= status < 500 and status not in (408, 429)
            else:  # botocore's NoCredentialsError, Google's DefaultCredentialsError
                no_key = type(error).__name__.endswith("CredentialsError")
                final = no_key or isinstance(error, _FOR_GOOD)
            if final:
                raise
            time.sleep(pause)
    return work()


def reader(files: Any, path: str, state: str, size: int, start: int, end: int | None) -> Ranges:
    """Return a file of a file system of fsspec to read from."""

    def fetch(first: int, last: int) -> bytes:
        data: bytes = files.cat_file(path, start=first, end=last)
        if len(data) != last - first:  # a server that ignores ranges
            raise OSError(f"{len(data)} bytes came where {last - first} were asked for")
        return data

    return Ranges(fetch, state, size, start, size if end is None else end)
