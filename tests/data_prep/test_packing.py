"""Check packing: each segment once, no row too long, no worse than a naive first fit."""

import random

import numpy as np
import pytest

from data_prep.pipeline.packing import fill_rows, pack, split_at_lines, split_tokens
from data_prep.pipeline.units import group


def first_fit_decreasing(lengths: list[int], capacity: int) -> int:
    """Return the number of rows that a textbook first fit needs."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        for row, room in enumerate(rooms):
            if room >= length:
                rooms[row] -= length
                break
        else:
            rooms.append(capacity - length)
    return len(rooms)


def best_fit_decreasing(lengths: list[int], capacity: int) -> list[list[int]]:
    """Pack by looking at every row; take the newest of equally full ones."""
    rows: list[list[int]] = []
    rooms: list[int] = []
    touched: list[int] = []
    for time, segment in enumerate(sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))):
        fits = [row for row, room in enumerate(rooms) if room >= lengths[segment]]
        if fits:
            row = min(fits, key=lambda row: (rooms[row], -touched[row]))
        else:
            row = len(rows)
            rows.append([])
            rooms.append(capacity)
            touched.append(0)
        rows[row].append(segment)
        rooms[row] -= lengths[segment]
        touched[row] = time
    return rows


@pytest.mark.parametrize("seed", range(8))
def test_rows_hold_every_segment_once(seed: int) -> None:
    draw = random.Random(seed)
    capacity = draw.choice([8, 64, 512])
    lengths = [draw.randint(2, capacity) for _ in range(draw.randint(1, 400))]
    rows = pack(lengths, capacity)
    assert sorted(segment for row in rows for segment in row) == list(range(len(lengths)))
    assert all(sum(lengths[segment] for segment in row) <= capacity for row in rows)
    assert rows == best_fit_decreasing(lengths, capacity)
    assert len(rows) <= first_fit_decreasing(lengths, capacity) + 1


def test_packing_a_small_example() -> None:
    # 8, 7 and 6 open rows; 4 fits 6's room exactly, 3 fits 7's, 2 fits 8's; the last 2 opens one
    assert pack([3, 7, 2, 6, 4, 2, 8], 10) == [[6, 2], [1, 0], [3, 4], [5]]
    assert pack([], 10) == []
    assert pack([10, 10], 10) == [[0], [1]]


def test_cut_never_splits_what_fits() -> None:
    ids = np.arange(10, dtype=np.int32)
    assert [piece.tolist() for piece in split_tokens(ids, 10)] == [ids.tolist()]
    assert [len(piece) for piece in split_tokens(ids, 4)] == [4, 4, 2]
    assert split_tokens(ids[:0], 4) == []


def test_lines_stay_whole_unless_longer_than_a_row() -> None:
    lines = [np.full(size, number, dtype=np.int32) for number, size in enumerate([3, 2, 0, 4, 12])]
    pieces = [piece.tolist() for piece in split_at_lines(lines, 5)]
    assert pieces == [[0, 0, 0, 1, 1], [3] * 4, [4] * 5, [4] * 5, [4] * 2]


def test_filling_rows_of_a_small_example() -> None:
    segments = [np.array([7], np.int32), np.array([8, 9], np.int32), np.array([6], np.int32)]
    rows, places = fill_rows(segments, [[1, 0], [2]], 8, cls=2, sep=3, pad=0, dtype=np.uint16)
    assert rows.tolist() == [[2, 8, 9, 3, 2, 7, 3, 0], [2, 6, 3, 0, 0, 0, 0, 0]]
    assert places.tolist() == [[0, 0, 1], [0, 4, 0], [1, 0, 2]]
    assert rows.dtype == np.uint16


def test_groups_are_consecutive_and_bounded() -> None:
    assert group([], 5) == []
    assert [list(g) for g in group([2, 3, 1, 9, 1, 1], 5)] == [[0, 1], [2], [3], [4, 5]]
