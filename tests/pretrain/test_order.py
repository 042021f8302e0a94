"""Check the row order, every row once an epoch for any batch size, and its hash."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pretrain.data.hashing import derive, mix, root
from pretrain.data.order import Order, permutation

EDGES = [0, 1, 2, 3, 0x7FFFFFFF, 0x80000000, 0xDEADBEEF, 0xFFFFFFFF]


def unmix(y: int) -> int:
    """Invert lowbias32: undo each xor-shift, multiply by the modular inverses."""
    y ^= y >> 16
    y = y * pow(0x846CA68B, -1, 2**32) % 2**32
    y ^= (y >> 15) ^ (y >> 30)
    y = y * pow(0x7FEB352D, -1, 2**32) % 2**32
    return y ^ (y >> 16)


def test_mix_is_invertible_and_the_same_in_python_numpy_and_torch() -> None:
    numbers = EDGES + [int(i) for i in np.random.default_rng(0).integers(0, 2**32, 1000)]
    mixed = [mix(number) for number in numbers]
    assert [unmix(y) for y in mixed] == numbers
    for array in (np.array(numbers), np.array(numbers, dtype=np.uint32), torch.tensor(numbers)):
        assert mix(array).tolist() == mixed
        assert array.tolist() == numbers  # it is read only


def test_derive_is_injective_and_the_same_in_python_numpy_and_torch() -> None:
    for key in (0, 1, 0xFFFFFFFF):
        python = [derive(key, index) for index in EDGES]
        assert derive(key, np.array(EDGES)).tolist() == python
        assert derive(key, np.array(EDGES, dtype=np.uint32)).tolist() == python
        assert derive(key, torch.tensor(EDGES)).tolist() == python
        assert len(np.unique(derive(key, np.arange(100_000)))) == 100_000


def test_root_depends_on_every_bit_of_the_seed_and_every_name() -> None:
    seeds = [0, 3, *(1 << bit for bit in range(64)), 2**64 - 1]
    names = [(use, index) for use in (1, 2, 3) for index in range(20)]
    keys = {root(seed, *name) for seed in seeds for name in names}
    assert len(keys) == len(seeds) * len(names)
    assert all(0 <= key < 2**32 for key in keys)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(st.integers(1, 2000), st.integers(0, 2**32 - 1), st.data())
@example(1, 0, None)
@example(1024, 2**32 - 1, None)
def test_any_permutation_is_a_bijection_and_the_same_in_parts(
    size: int, key: int, data: st.DataObject | None
) -> None:
    whole = permutation(np.arange(size), size, key)
    assert np.array_equal(np.sort(whole), np.arange(size))
    places = data.draw(st.lists(st.integers(0, size), max_size=5)) if data else [size // 2]
    chunks = np.split(np.arange(size), sorted(places))
    assert np.array_equal(np.concatenate([permutation(c, size, key) for c in chunks]), whole)
    assert all(permutation(np.array([i]), size, key) == whole[i] for i in (0, size // 2, size - 1))


@pytest.mark.parametrize(("rows", "batch"), [(10, 4), (7, 7), (5, 12), (1, 3), (100, 1)])
def test_every_epoch_visits_every_row_once(rows: int, batch: int) -> None:
    """Check batches that span epochs or are longer than one: no row is dropped or repeated."""
    order = Order(rows, batch, seed=11)
    steps = -(-3 * rows // batch)
    seen: dict[int, list[int]] = {}
    flat = []
    for step in range(steps):
        epochs, numbers = order.at(step)
        assert len(epochs) == len(numbers) == batch
        flat += epochs.tolist()
        for epoch, number in zip(epochs.tolist(), numbers.tolist(), strict=True):
            seen.setdefault(epoch, []).append(number)
    assert flat == [position // rows for position in range(steps * batch)]
    for epoch in range(3):
        assert sorted(seen[epoch]) == list(range(rows))


@pytest.mark.parametrize(
    ("rows", "batch", "epochs", "steps"),
    [
        (10, 5, 1, 2),
        (10, 4, 1, 3),
        (10, 4, 2, 5),
        (10, 4, 0.5, 2),
        (3, 100, 3, 1),
        (7, 1, 3, 21),
        (10, 4, 0.05, 1),
        (100, 1, 0.29, 29),
        (10, 1, 0.3, 3),
    ],
)
def test_steps_for_rounds_up(rows: int, batch: int, epochs: float, steps: int) -> None:
    assert Order(rows, batch, 0).steps_for(epochs) == steps


def test_golden_values() -> None:
    """Compare with committed values: a change would silently reorder every resumed run."""
    assert [mix(x) for x in (1, 2, 0xFFFFFFFF)] == [1753845952, 3507691905, 1734902346]
    assert (derive(5, 9), root(2**40 + 3, 1, 2)) == (1453137416, 2585391108)
    assert permutation(np.arange(10), 10, 123).tolist() == [0, 3, 9, 6, 2, 8, 1, 7, 5, 4]
    # At powers of four, where the network is just large enough, and below.
    for size in (1, 2, 3, 4, 15, 16, 17):
        half = next(bits for bits in range(1, 9) if 4**bits >= size)
        low, keys = 2**half - 1, [derive(123, i) for i in range(6)]
        for index, found in enumerate(permutation(np.arange(size), size, 123).tolist()):
            x = index
            while True:
                left, right = x >> half, x & low
                for key in keys:
                    left, right = right, left ^ (int(mix(right + key)) & low)
                if (x := (left << half) | right) < size:
                    break
            assert found == x, (size, index)
    order = Order(100, 8, seed=42)
    assert order.at(0)[1].tolist() == [1, 69, 63, 7, 83, 37, 4, 65]
    assert order.at(12)[1].tolist() == [19, 11, 51, 85, 13, 87, 82, 8]
    assert order.at(1_000_000)[1].tolist() == [63, 56, 78, 37, 35, 1, 65, 59]
