"""Compare duplicates and draws with plain Python."""

import itertools
import random
from pathlib import Path

import numpy as np
import pytest

from data_prep.duplicates import dedup
from data_prep.duplicates.dedup import Items, Pairs, clusters, draw, pairs, similar, text_hash


def save(folders: list[Path], texts: list[list[str]], near: bool) -> list[int]:
    """Save one unit's items in each folder; return the number of the first of each, and of all."""
    for folder, of_unit in zip(folders, texts, strict=True):
        folder.mkdir()
        items = Items(folder, "documents", 5 if near else None)
        for text in of_unit:
            items.add(text_hash(text), text)
        items.save()
    return [0, *itertools.accumulate(len(of_unit) for of_unit in texts)]


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    bounds = save([tmp_path / "a", tmp_path / "b"], [["one", "two"], ["two"]], near=False)
    (tmp_path / "a" / "documents-texts-00000.npy").unlink()
    with pytest.raises(FileNotFoundError, match="documents-texts-00000"):
        pairs([tmp_path / "a", tmp_path / "b"], bounds, "documents-texts", 0, 1)


def components(edges: list[tuple[int, int]]) -> dict[int, int]:
    """Map each item to the smallest of its component, by walking."""
    neighbours: dict[int, set[int]] = {}
    for a, b in edges:
        neighbours.setdefault(a, set()).add(b)
        neighbours.setdefault(b, set()).add(a)
    found: dict[int, int] = {}
    for item in sorted(neighbours):
        waiting = [item]
        while waiting:
            here = waiting.pop()
            if here not in found:
                found[here] = item
                waiting += neighbours[here]
    return found


@pytest.mark.parametrize("slices", [1, 3, 64])
def test_equal_texts_pair_with_the_first_whatever_the_slices(tmp_path: Path, slices: int) -> None:
    source = random.Random(0)
    texts = [f"text {source.randint(0, 60)}" for _ in range(200)]
    folders = [tmp_path / name for name in "abcd"]
    bounds = save(folders, [texts[:50], [], texts[50:51], texts[51:]], near=False)
    found = np.concatenate(
        [pairs(folders, bounds, "documents-texts", number, slices) for number in range(slices)]
    )
    expected = {
        (texts.index(text), number)
        for number, text in enumerate(texts)
        if texts.index(text) != number
    }
    assert {tuple(pair) for pair in found.tolist()} == expected
    assert len(found) == len(expected)


@pytest.mark.parametrize("chunk", [7, 2**16])
def test_near_duplicates_are_those_a_naive_jaccard_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(dedup, "CHUNK", chunk)
    source = random.Random(1)
    words = [f"w{number}" for number in range(5000)]
    texts = []
    for _ in range(60):
        text = source.choices(words, k=300)
        texts.append(text)
        for changed in (3, 100):  # Jaccard of about 0.9, and of about 0.2
            copy = list(text)
            for place in source.sample(range(300), changed):
                copy[place] = source.choice(words)
            texts.append(copy)
    joined = [" ".join(text) for text in texts]
    folders = [tmp_path / "a", tmp_path / "b"]
    bounds = save(folders, [joined[:77], joined[77:]], near=True)
    candidates = np.concatenate(
        [pairs(folders, bounds, "documents-bands", number, 5) for number in range(5)]
    )
    found = similar(folders, bounds, "documents", candidates, 0.7)
    shingles = [{tuple(text[i : i + 5]) for i in range(len(text) - 4)} for text in texts]
    naive = {
        (a, b)
        for a, b in itertools.combinations(range(len(texts)), 2)
        if len(shingles[a] & shingles[b]) / len(shingles[a] | shingles[b]) > 0.7
    }
    assert len(naive) == 60
    assert {tuple(pair) for pair in found.tolist()} == naive


def test_texts_too_short_for_a_shingle_are_near_nothing(tmp_path: Path) -> None:
    bounds = save([tmp_path / "a"], [["two words", "two words!", "", "so few again"]], near=True)
    assert len(pairs([tmp_path / "a"], bounds, "documents-bands", 0, 1)) == 0


@pytest.mark.parametrize("edges", [0, 1, 30, 300])
def test_clusters_are_connected_components(edges: int) -> None:
    source = random.Random(edges)
    found = [tuple(sorted(source.sample(range(200), 2))) for _ in range(edges)]
    array: Pairs = np.array(found, dtype=np.int64).reshape(-1, 2)
    items, cluster_of = clusters(array)
    expected = components([(a, b) for a, b in found])
    assert dict(zip(items.tolist(), cluster_of.tolist(), strict=True)) == expected


def test_a_long_chain_is_one_cluster() -> None:
    order = np.random.default_rng(0).permutation(10_000)
    items, cluster_of = clusters(np.stack([order[:-1], order[1:]], axis=1))
    assert len(items) == 10_000 and not cluster_of.any()


def test_draws_equal_recorded_numbers() -> None:
    # golden: a new value would move documents between splits of every corpus prepared before
    assert text_hash("a").hex() == "27c35e6e9373877f29e562464e46497e"
    assert draw(text_hash("a"), 0, "validation") == 0.3667313160133443
