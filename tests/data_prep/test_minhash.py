"""Compare word hashes, n-grams and signatures with plain Python sets and counted probabilities."""

from __future__ import annotations

import random
import re
import string

import numpy as np
import numpy.typing as npt
import pytest
from rensa import RMinHash

from data_prep.duplicates import minhash
from data_prep.duplicates.minhash import bands, ngrams, signatures, similarity, word_hashes

LONG = 70_000  # words: more than are hashed at once
HAN = "\u81ea\u7136\u8a00\u8a9e\u51e6\u7406"
THAI = "\u0e20\u0e32\u0e29\u0e32\u0e44\u0e17\u0e22"
KANA = "\u30ab\u30ca\u304b\u306a"
KHMER = "\u1781\u17d2\u1798\u17c2\u179a"
GOLDEN_WORDS = [14079674147953808513, 16129863776332409755, 10462968610252235655]
GOLDEN_NGRAMS = [13876962629789462687, 2907640147574276418]
GOLDEN_SLOTS = [3352340462, 1227861053, 2216075700, 432082675]
GOLDEN_BANDS = [15023312779606956200, 12478033227523452211]
GOLDEN_ALL_WORDS = 11433853060452320102
GOLDEN_ALL_BANDS = 38752692581687217


def english(words: int, seed: int, vocabulary: int = 50_000) -> list[str]:
    source = random.Random(seed)
    return [f"w{source.randrange(vocabulary)}x" for _ in range(words)]


def shingles(words: list[str]) -> set[tuple[str, ...]]:
    return {tuple(words[i : i + 5]) for i in range(len(words) - 4)}


def jaccard(a: list[str], b: list[str]) -> float:
    return len(shingles(a) & shingles(b)) / len(shingles(a) | shingles(b))


def sketches(jaccard: float, pairs: int, size: int) -> tuple[npt.NDArray[np.uint32], ...]:
    """Return the signatures of pairs of sets of `size` shingles with a known Jaccard."""
    source = np.random.default_rng(5)
    shared = round(2 * size * jaccard / (1 + jaccard))
    a, b = source.integers(0, 2**64, (2, pairs, size), dtype=np.uint64)
    b[:, :shared] = a[:, :shared]
    return minhash._sketched(list(a)), minhash._sketched(list(b))


def equal(a: str, b: str) -> bool:
    return word_hashes(a).tolist() == word_hashes(b).tolist()


def test_words_are_runs_of_letters_and_digits_as_a_regex_finds_them() -> None:
    source = random.Random(0)
    characters = (
        string.printable * 3
        + "\u00e9\u00c9\u00df\u00e7\u00f1\u00f8\u03bb\u0414\u0436\u2013\u2014\u201c\u201d\u00a0"
    )
    text = "".join(source.choices(characters, k=20_000)) + " longer words of all lengths "
    text += " ".join("abcdefgh"[:n] * m for n in range(1, 9) for m in range(1, 8))
    words = re.findall(r"[^\W_]+", text.lower())
    hashes = word_hashes(text).tolist()
    # the same hash for the same word, another for another: the two sequences name each other
    assert len(hashes) == len(words)
    assert len(set(hashes)) == len(set(words)) == len(set(zip(words, hashes, strict=True)))


def test_case_punctuation_spacing_and_compatibility_forms_do_not_count() -> None:
    assert equal(
        "It's \u00c9lan, \u201cno less\u201d\u2013AT 10\u00b2", "it s   \u00e9lan\nNO LESS at (102)"
    )
    assert equal("\uff26ull\u3000width", "full width")
    assert equal("a b", "a b \u00ad \ud800 \U0001f600 \U000f0000")
    assert not equal("resume", "r\u00e9sum\u00e9")
    assert not equal("ab c", "a bc")


def test_scripts_without_spaces_give_a_word_a_character() -> None:
    for text in (HAN, THAI, KANA, KHMER, "\U00020000\U00020001"):
        hashes = word_hashes(text).tolist()
        assert len(hashes) == len(text)
        assert len(set(hashes)) == len(set(text))
    assert len(word_hashes("\ud55c\uad6d\uc5b4 \ucc98\ub9ac")) == 2
    assert equal("x\u6f22y \u5b57", "X \u6f22 Y\u5b57")
    assert not equal("\u6f22\u5b57", "\u5b57\u6f22")


def test_words_longer_than_64_bytes_count_as_several() -> None:
    protein = "".join(random.Random(1).choices("ACDEFGHIKLMNPQRSTVWY", k=300))
    pieces = " ".join(protein[i : i + 64] for i in range(0, 300, 64))
    assert equal(f"a {protein} b", f"a {pieces} b")


def test_no_words_give_no_hashes() -> None:
    for text in ("", " \n", "...", "\u2013"):
        assert word_hashes(text).shape == (0,)
        assert word_hashes(text).dtype == np.uint64


@pytest.mark.parametrize("n", [1, 2, 5, 13])
def test_ngrams_are_equal_exactly_where_the_words_are(n: int) -> None:
    words = english(100_000, seed=2, vocabulary=12)  # 12 words: runs repeat, in all orders
    expected = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    hashes = ngrams(word_hashes(" ".join(words)), n).tolist()
    assert len(hashes) == len(expected)
    assert len(set(hashes)) == len(set(expected)) == len(set(zip(expected, hashes, strict=True)))


def test_ngrams_use_all_their_bits_and_need_n_words() -> None:
    words = word_hashes(" ".join(english(20_000, seed=3)))
    hashes = ngrams(words, 5)
    for bit in range(64):
        ones = (hashes >> np.uint64(bit) & np.uint64(1)).mean()
        assert abs(ones - 0.5) < 5 * 0.5 / len(hashes) ** 0.5
    for count in range(5):
        assert len(ngrams(words[:count], 5)) == 0
    assert len(ngrams(words[:5], 5)) == 1


def test_estimates_agree_with_plain_sets_of_shingles() -> None:
    for number, changed in enumerate([0, 1, 3, 10, 30, 100, 300]):
        for size in (40, 400, 4000):  # fewer and more shingles than slots
            a = english(size, seed=10 * number + size)
            b = list(a)
            for place in random.Random(number).sample(range(size), min(changed, size // 3)):
                b[place] = "another"
            truth = jaccard(a, b)
            (both, usable) = signatures([" ".join(a), ", ".join(b).upper()])
            (estimate,) = similarity(both[:1], both[1:])
            sigma = (truth * (1 - truth) / minhash.NUM_PERMUTATIONS) ** 0.5
            assert usable.all()
            assert abs(estimate - truth) <= 4 * sigma + 1e-9, (changed, size)


def test_the_order_and_number_of_equal_shingles_do_not_count() -> None:
    a, b = english(50, seed=6), english(60, seed=7)
    once, often = a + b + a + b, b + a + b + a + b + a
    assert shingles(once) == shingles(often)
    result, _ = signatures([" ".join(once), " ".join(often)])
    assert (result[0] == result[1]).all()


def test_bands_are_equal_exactly_where_their_slots_are() -> None:
    a, b = sketches(0.7, pairs=200, size=300)
    expected = [
        [(a[i, 6 * k : 6 * k + 6] == b[i, 6 * k : 6 * k + 6]).all() for k in range(21)]
        for i in range(200)
    ]
    assert (bands(a) == bands(b)).tolist() == expected
    # a band's number goes in: all bands of this signature hold the same values
    assert len(set(bands(np.full((1, 128), 7, dtype=np.uint32))[0].tolist())) == 21
    assert bands(a[::2]).tolist() == bands(a)[::2].tolist()
    assert bands(a[:0]).shape == (0, 21)


def test_texts_of_fewer_than_five_words_have_no_signature() -> None:
    texts = ["", "one two three four", "one two three four five", HAN[:4], HAN[:5]]
    result, usable = signatures(texts)
    assert usable.tolist() == [False, False, True, False, True]
    assert result.shape == (5, 128) and result.dtype == np.uint32
    nothing, none = signatures([])
    assert nothing.shape == (0, 128) and none.shape == (0,)


def test_a_signature_does_not_depend_on_the_other_texts() -> None:
    texts = [" ".join(english(size % 150, seed=size)) for size in range(300)]
    together, usable = signatures(texts)
    alone = [signatures([text]) for text in texts]
    assert (together == np.concatenate([one for one, _ in alone])).all()
    assert (usable == np.concatenate([one for _, one in alone])).all()
    backwards, _ = signatures(texts[::-1])
    assert (backwards[::-1] == together).all()


def test_a_long_text_in_slices_is_as_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    text = " ".join(english(LONG, seed=8)) + " \u00e9 " + "q" * 1000 + " " + HAN * 50
    assert len(text) > 4 * minhash._PIECE and LONG > minhash._SLICE
    words, (sketch, _) = word_hashes(text), signatures([text, "one two three four five six"])
    for size in (2**6, 2**30):
        monkeypatch.setattr(minhash, "_SLICE", max(size, 2**9))
        monkeypatch.setattr(minhash, "_PIECE", max(size, 2**10))
        assert (word_hashes(text) == words).all()
        assert (signatures([text])[0][0] == sketch[0]).all()


def test_hashes_equal_recorded_bytes() -> None:
    # golden: another value makes signatures of old and new units differ silently; if a change is
    # meant, raise WORDS, and the behaviour of the stage `extract`
    assert minhash.WORDS == "words 1" and RMinHash.ALGORITHM_VERSION == 2
    text = "The quick brown fox \u2013 it's \u201c\u00c9lan\u201d \u2013 jumps over 13 lazy dogs"
    text += "; " + HAN
    words = word_hashes(text)
    sketch, _ = signatures([text])
    assert words[:3].tolist() == GOLDEN_WORDS
    assert ngrams(words, 5)[:2].tolist() == GOLDEN_NGRAMS
    assert sketch[0, :4].tolist() == GOLDEN_SLOTS
    assert bands(sketch)[0, :2].tolist() == GOLDEN_BANDS
    assert int(np.bitwise_xor.reduce(words)) == GOLDEN_ALL_WORDS
    assert int(np.bitwise_xor.reduce(bands(sketch), axis=None)) == GOLDEN_ALL_BANDS
