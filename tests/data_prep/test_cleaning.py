"""Test cleaning on single cases, and its guarantees on random text."""

from __future__ import annotations

import random
import unicodedata

import pytest

from data_prep.text.cleaning import clean


@pytest.mark.parametrize(
    ("dirty", "expected"),
    [
        ("e\u0301te\u0301", "\u00e9t\u00e9"),
        ("a\tb\u00a0c\u3000d  e", "a b c d e"),
        ("a\r\nb\rc\u2028d\u2029e\u0085f", "a\nb\nc\nd\ne\nf"),
        ("\ufeffa\u200bb\u00adc\x00d\x1be\u202ef", "abcdef"),
        (" a \n  b  \n\n\n\n c \n", "a\n\nb\n\nc".replace("a\n\nb", "a\nb")),
        ("x\ud800y\udc00", "xy"),
        ("\u0646\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",) * 2,  # Persian needs U+200C
        (" \n\t ", ""),
        ("plain text", "plain text"),
        (" plain  text ", "plain text"),
    ],
)
def test_clean(dirty: str, expected: str) -> None:
    assert clean(dirty) == expected


def test_cleaned_random_text_is_stable_and_valid() -> None:
    rng = random.Random(0)
    alphabet = [*range(0x100), *range(0x300, 0x320), *range(0x2000, 0x2070), 0xD800, 0xDFFF]
    alphabet += [0x3000, 0xFEFF, 0x1100, 0x1161, 0xAC00, 0x1F600, 0x212B, *[10, 13, 32] * 40]
    for _ in range(3000):
        once = clean("".join(chr(rng.choice(alphabet)) for _ in range(40)))
        assert clean(once) == once
        once.encode("utf-8")
        assert unicodedata.is_normalized("NFC", once)
        assert "  " not in once and "\n\n\n" not in once
        assert all(line == line.strip(" ") for line in once.split("\n"))
        assert all(c == "\n" or unicodedata.category(c) != "Cc" for c in once)
