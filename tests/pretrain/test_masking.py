"""Check masking: rates, uniformity, independence of the batch, a reference in plain Python."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.masks import (
    CLS,
    MASK,
    PAD,
    SEP,
    SPECIAL,
    UNIFORM,
    UNK,
    Ids,
    V,
    drawn_ids,
    mask,
    ordinary,
    selected,
)

from data_prep.shards import Manifest, open_shards
from pretrain.config import MaskingConfig
from pretrain.contracts.batch import IGNORE
from pretrain.data.hashing import derive, root
from pretrain.tasks.mlm.examples import build_masking
from pretrain.tasks.mlm.masking import _EXPONENTIAL, Masked, Masking, first_slots

# count**0.7 for words that occur `100 * id` times.
SMOOTHED = replace(UNIFORM, smoothing=(10 * (100.0 * np.arange(V)) ** 0.7 + 1).astype(np.int64))
# As `prepare` scales it: up to 2**25 - 1, so that draws take 51 bits.
PREPARED = replace(
    UNIFORM, smoothing=((2**25 - 1) * np.linspace(1e-3, 1, V) ** 0.7).astype(np.int64)
)
EVALUATION = replace(UNIFORM, replace="mask")
MODES = [UNIFORM, SMOOTHED, PREPARED, EVALUATION]
NAMES = ["uniform", "smoothed", "smoothed as prepared", "evaluation"]


@pytest.fixture(scope="module")
def masked(ids: Ids) -> Masked:
    return mask(ids)


def deviations(count: int, trials: int, probability: float) -> float:
    """Return the distance of a count from its expectation in binomial standard deviations."""
    return (count - trials * probability) / np.sqrt(trials * probability * (1 - probability))


@pytest.fixture(scope="module")
def ids() -> Ids:
    return drawn_ids()


def test_fifteen_percent_of_every_rows_ordinary_tokens(ids: Ids, masked: Masked) -> None:
    assert masked.positions.shape == masked.labels.shape == (512, 77)  # round(0.15 * 512)
    wanted = 0.15 * ordinary(ids).sum(1)
    found = (masked.labels != IGNORE).sum(1)
    assert np.abs(found - wanted).max() <= 0.51  # rounded to the nearest
    assert ordinary(ids).sum() > 100_000
    assert found.sum() / ordinary(ids).sum() == pytest.approx(0.15, abs=5e-4)


def test_eighty_ten_ten(ids: Ids, masked: Masked) -> None:
    flags = selected(masked, ids.shape)
    put, original = masked.input_ids[flags], ids[flags]
    num = len(put)
    same = 1 / (V - len(SPECIAL))  # a random word may be the original one
    assert abs(deviations((put == MASK).sum(), num, 0.8)) < 4
    assert abs(deviations((put == original).sum(), num, 0.1 + 0.1 * same)) < 4
    other = (put != MASK) & (put != original)
    assert abs(deviations(other.sum(), num, 0.1 * (1 - same))) < 4


def check_with_plain_python(
    masking: Masking, result: Masked, ids: Ids, epochs: Ids, rows: Ids, checked: Iterable[int]
) -> None:
    """Compute rows `checked` one position at a time with Python's integers and `sorted`."""
    share = round(masking.probability * 65536)
    for i in checked:
        row, number = ids[i].tolist(), int(rows[i])
        base = derive(root(masking.seed, 2), int(epochs[i]))
        select, action, replacement = (derive(derive(base, j), number) for j in range(3))
        draws = [derive(select, position) for position in range(len(row))]
        if masking.smoothing is not None:
            weights = masking.smoothing[row].tolist()
            draws = [
                int(_EXPONENTIAL[draw >> 16]) * weight
                for draw, weight in zip(draws, weights, strict=True)
            ]
        words = [position for position, word in enumerate(row) if word not in SPECIAL]
        first = sorted(words, key=lambda position: (draws[position], position))
        first = first[: max(1, (len(words) * share + 32768) // 65536)]
        expected = list(row)
        for position in first:
            kind = derive(action, position) % 10
            if kind < 8 or masking.replace == "mask":
                expected[position] = MASK
            elif kind == 9:  # the ordinary words are 5 to 199
                expected[position] = 5 + (derive(replacement, position) * (V - 5) >> 32)
        used = result.labels[i] != IGNORE
        assert result.positions[i][used].tolist() == first
        assert result.labels[i][used].tolist() == [row[position] for position in first]
        assert result.input_ids[i].tolist() == expected


@pytest.mark.parametrize("masking", MODES, ids=NAMES)
@pytest.mark.parametrize("seed", [0, 17, 2**64 - 1])
def test_masks_equal_a_plain_python_reference(masking: Masking, seed: int, ids: Ids) -> None:
    """Compare rows out of 200, more than are masked at a time, of any epochs and numbers."""
    masking, some = replace(masking, seed=seed), ids[:200]
    epochs, rows = np.arange(200) % 3 + 2**20, np.arange(200) * 21_474_836
    epochs[:3], rows[:3] = [0, 1, 7], [0, 2**31, 2**32 - 1]
    result = masking(some, epochs, rows)
    assert result.input_ids.dtype == np.int64
    checked = [0, 1, 2, 63, 64, *range(70, 200, 5)]
    check_with_plain_python(masking, result, some, epochs, rows, checked)


@pytest.mark.parametrize("masking", MODES, ids=NAMES)
@pytest.mark.parametrize("length", [1, 8, 50, 128, 511, 512, 4096])
@pytest.mark.parametrize("probability", [0.01, 0.1, 0.15, 0.3, 0.9, 0.99999])
def test_rows_of_any_length_equal_the_reference(
    masking: Masking, length: int, probability: float
) -> None:
    """Compare from one row to more than are masked at a time, some with few tokens or no other.

    A row of tokens only is the hardest case for the number of slots.
    """
    masking = replace(masking, probability=probability)
    draw = np.random.default_rng(length)
    for num_rows in (1, 40, 700) if length < 511 else (1, 40):
        some = draw.integers(0, V, (num_rows, length))
        some[::9, length // 9 :] = PAD
        some[1::9] = 50
        epochs, rows = np.full(num_rows, 2), draw.integers(0, 2**32, num_rows)
        result = masking(some, epochs, rows)
        checked = {0, num_rows // 2, num_rows - 1} | {1, 10} & {*range(num_rows)}
        check_with_plain_python(masking, result, some, epochs, rows, checked)


@pytest.mark.parametrize("masking", MODES, ids=NAMES)
@pytest.mark.parametrize("kind", [np.uint16, np.uint32, np.int64])
def test_masks_do_not_depend_on_the_integer_type(masking: Masking, kind: type, ids: Ids) -> None:
    narrow = mask(ids.astype(kind), masking)
    assert [array.dtype for array in narrow] == [kind, np.int64, np.int64]
    columns = mask(np.asfortranarray(ids), masking)  # another order in memory
    for one, other, expected in zip(narrow, columns, mask(ids, masking), strict=True):
        assert (one == expected).all() and (other == expected).all()


@pytest.mark.parametrize("spread", [1, 3, 40, 2**32], ids=lambda spread: f"{spread} values")
@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 1.0], ids=lambda share: f"{share} selectable")
@pytest.mark.parametrize("bits", [32, 51])
def test_equal_draws_keep_their_order(spread: int, share: float, bits: int) -> None:
    """Compare with `sorted`, with ties and rows with too few tokens."""
    make = np.random.default_rng(spread)
    draw = make.integers(0, spread, (30, 64)) << (bits - 32 if spread > 40 else 0)
    draw[0, :40] = 2**32 - 1 if bits == 32 else 2**51 - 2  # the largest: beside the unselectable
    selectable = make.random((30, 64)) < share
    narrow = draw.astype(np.uint32) if bits == 32 else draw
    for count in (1, 10, 64):
        expected = [
            sorted(range(64), key=lambda p: (not chosen[p], row[p] if chosen[p] else 0, p))[:count]
            for row, chosen in zip(draw.tolist(), selectable.tolist(), strict=True)
        ]
        assert first_slots(narrow, selectable, count).tolist() == expected


def test_masking_does_not_change_its_input(ids: Ids) -> None:
    some = ids[:4].copy()
    mask(some)
    assert (some == ids[:4]).all()


def test_frequency_weighted_draws_follow_count_to_the_minus_0_7() -> None:
    """Compare frequencies of three classes with a float Efraimidis-Spirakis race."""
    counts = np.array([100, 1_000, 20_000])
    words = np.array([10, 11, 12])
    table = np.ones(V, np.int64)
    table[words] = np.round(30_000 * (counts / 20_000) ** 0.7)
    ids = np.repeat(np.tile(words, 20)[None, :], 4000, axis=0)  # 20 of each in a row of 60
    result = mask(ids, replace(UNIFORM, smoothing=table))
    found = np.array([(result.labels == word).sum() for word in words])
    assert found.sum() == 9 * 4000  # round(0.15 * 60): the share is that of uniform masking

    draw = np.random.default_rng(2)
    weights = np.tile(counts.astype(float) ** -0.7, 20)
    race = draw.exponential(size=(20_000, 60)) / weights
    winners = np.argsort(race, axis=1)[:, :9] % 3
    expected = np.bincount(winners.ravel(), minlength=3) / 20_000 * 4000
    deviation = np.sqrt(expected * (1 + 4000 / 20_000))  # of both; less without replacement
    assert (np.abs(found - expected) < 4 * deviation).all(), (found, expected)
    assert found[0] > 3 * found[1] > 9 * found[2]


def test_the_exponential_table_is_minus_the_logarithm() -> None:
    exact = -np.log((np.arange(1 << 16) + 0.5) / (1 << 16)) * 2**22
    assert np.abs(_EXPONENTIAL - exact).max() <= 2
    assert _EXPONENTIAL.min() >= 1  # a draw of 0 would win whatever its weight


def test_prepared_counts_become_smoothed_masking(corpus: Path, manifest: Manifest) -> None:
    """Check that the table beside the shards is count**0.7 of what the training rows hold."""
    masking = build_masking(MaskingConfig(mode="smoothed"), corpus, manifest, seed=5)
    shards = open_shards(corpus)
    rows = shards.rows(np.arange(len(shards))).astype(np.int64)
    counts = np.bincount(rows.ravel(), minlength=V)
    table = json.loads((corpus / "token_counts.json").read_text())
    assert table["counts"][len(SPECIAL) :] == counts[len(SPECIAL) :].tolist()
    assert masking.smoothing is not None
    power = np.maximum(counts, 1.0)[len(SPECIAL) :] ** 0.7
    found = masking.smoothing[len(SPECIAL) :]
    np.testing.assert_allclose(found / found.max(), power / power.max(), rtol=1e-5)

    rare = counts[rows] <= np.median(counts[len(SPECIAL) :])
    rare &= ordinary(rows)
    chances = []
    for mode in (masking, build_masking(MaskingConfig(), corpus, manifest, seed=5)):
        hits = total = 0
        for epoch in range(100):
            flags = selected(mask(rows, mode, epoch), rows.shape)
            hits, total = hits + int((flags & rare).sum()), total + int(flags.sum())
        chances.append(hits / total)
    uniform = rare.sum() / ordinary(rows).sum()
    assert chances[1] == pytest.approx(uniform, rel=0.1)
    assert chances[0] > 1.5 * uniform


@pytest.mark.parametrize("masking", [UNIFORM, SMOOTHED], ids=["uniform", "smoothed"])
def test_rows_with_few_tokens(masking: Masking) -> None:
    """Check rows without tokens (no prediction) and with one to nine (one prediction)."""
    rows = [
        [CLS, SEP] + [PAD] * 14,
        [PAD] * 16,
        [CLS, 7, SEP] + [PAD] * 13,
        [CLS, UNK, MASK, 8, SEP] + [PAD] * 11,
        [CLS, *range(20, 29), SEP] + [PAD] * 5,
        [CLS, *range(20, 31), SEP] + [PAD] * 3,  # 1.65 of 11
        [CLS, *range(20, 34), SEP],
    ]
    result = mask(np.array(rows), masking)
    labels = [[x for x in row if x != IGNORE] for row in result.labels.tolist()]
    assert [len(row) for row in labels] == [0, 0, 1, 1, 1, 2, 2]
    assert labels[2:4] == [[7], [8]]
    assert result.input_ids.tolist()[:2] == rows[:2]


def test_golden_values() -> None:
    """Compare with committed values: a change would silently change every resumed run's masks."""
    ids = (np.arange(2 * 40).reshape(2, 40) * 7 + 5) % 195 + 5
    ids[:, 0], ids[:, -1] = CLS, SEP
    epochs, rows = np.array([0, 3]), np.array([0, 123_456_789])
    for masking, golden in ((UNIFORM, GOLDEN_UNIFORM), (SMOOTHED, GOLDEN_SMOOTHED)):
        result = masking(ids, epochs, rows)
        put = np.take_along_axis(result.input_ids, result.positions, axis=1)
        assert (result.positions.tolist(), put.tolist()) == golden


GOLDEN_UNIFORM = (
    [[20, 28, 23, 37, 21, 18], [29, 23, 8, 2, 13, 24]],
    [[4, 4, 4, 4, 4, 4], [4, 4, 4, 4, 4, 4]],
)
GOLDEN_SMOOTHED = (
    [[4, 38, 29, 9, 34, 5], [12, 3, 16, 34, 26, 15]],
    [[4, 81, 4, 4, 4, 45], [4, 116, 62, 4, 4, 14]],
)
