"""Pack segments into rows by best-fit decreasing, deterministically."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def pack(lengths: npt.ArrayLike, capacity: int) -> list[list[int]]:
    """Put each segment whole into one row of `capacity`; return the segment numbers of each row.

    Segments go in from the longest to the shortest (the first of equals first), each into the
    fullest row that still takes it (the newest of equals).
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    assert sizes.ndim == 1
    assert not sizes.size or (sizes.min() > 0 and sizes.max() <= capacity)
    rows: list[list[int]] = []
    rows_with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    # Bit r is set while some row has room r: the best fit is one shift and its lowest bit, so
    # packing costs O(segments), whatever the number of open rows.
    rooms = 0
    for segment in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[segment])
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            row = rows_with_room[room].pop()
            if not rows_with_room[room]:
                rooms ^= 1 << room
            rows[row].append(segment)
        else:
            room, row = capacity, len(rows)
            rows.append([segment])
        room -= size
        if room:
            rows_with_room[room].append(row)
            rooms |= 1 << room
    return rows


def split_tokens(tokens: npt.NDArray[np.int32], limit: int) -> list[npt.NDArray[np.int32]]:
    """Split a document's ids into pieces of `limit`; one that fits is never cut."""
    return [tokens[start : start + limit] for start in range(0, len(tokens), limit)]


def split_at_lines(
    lines: Sequence[npt.NDArray[np.int32]], limit: int
) -> list[npt.NDArray[np.int32]]:
    """Join lines greedily into pieces of at most `limit` ids; only a longer line is split."""
    pieces: list[npt.NDArray[np.int32]] = []
    held: list[npt.NDArray[np.int32]] = []
    room = limit
    for piece in (piece for line in lines for piece in split_tokens(line, limit)):
        if len(piece) > room:
            pieces.append(np.concatenate(held))
            held, room = [], limit
        held.append(piece)
        room -= len(piece)
    if held:
        pieces.append(np.concatenate(held))
    return pieces


def fill_rows(
    segments: Sequence[npt.NDArray[np.int32]],
    rows: Sequence[Sequence[int]],
    row_length: int,
    *,
    cls: int,
    sep: int,
    pad: int,
    dtype: npt.DTypeLike,
) -> tuple[npt.NDArray[np.uint16 | np.uint32], npt.NDArray[np.int64]]:
    """Write segments into rows as `[CLS] ids [SEP]`.

    Returns the ids [rows, row_length] and, in that order, (row, start, segment) of each [s, 3].
    """
    filled = np.full((len(rows), row_length), pad, dtype=dtype)
    places = np.empty((sum(map(len, rows)), 3), dtype=np.int64)
    place = 0
    for row, members in enumerate(rows):
        start = 0
        for segment in members:
            ids = segments[segment]
            end = start + len(ids) + 1
            filled[row, start] = cls
            filled[row, start + 1 : end] = ids
            filled[row, end] = sep
            places[place] = row, start, segment
            start, place = end + 1, place + 1
    return filled, places
