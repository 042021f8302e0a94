"""Duplicates and draws, against plain Python."""

import random

import numpy as np
import numpy.typing as npt

from data_prep.dedup import KEY, draw, first_of_each, text_hash


def keys(texts: list[str]) -> npt.NDArray[np.void]:
    return np.frombuffer(b"".join(map(text_hash, texts)), dtype=KEY)


def test_the_first_of_equal_texts_survives() -> None:
    source = random.Random(0)
    texts = [f"text {source.randint(0, 60)}" for _ in range(200)]
    expected = [text not in texts[:number] for number, text in enumerate(texts)]
    assert first_of_each(keys(texts)).tolist() == expected
    assert first_of_each(keys([])).tolist() == []


def test_draws_are_even_and_independent() -> None:
    hashes = [text_hash(str(number)) for number in range(4000)]
    fraction = np.array([draw(key, 0, "fraction") for key in hashes])
    validation = np.array([draw(key, 0, "validation") for key in hashes])
    other_seed = np.array([draw(key, 1, "fraction") for key in hashes])
    for values in (fraction, validation, other_seed):
        assert values.min() >= 0 and values.max() < 1
        assert abs(values.mean() - 0.5) < 0.02
    # among those that a fraction keeps, validation is as frequent as everywhere
    assert abs((validation[fraction < 0.1] < 0.5).mean() - 0.5) < 0.1
    assert abs(np.corrcoef(fraction, other_seed)[0, 1]) < 0.06


def test_a_draw_never_changes() -> None:
    # golden: a new value would move documents between splits of every corpus prepared before
    assert text_hash("a").hex() == "27c35e6e9373877f29e562464e46497e"
    assert draw(text_hash("a"), 0, "validation") == 0.3667313160133443
