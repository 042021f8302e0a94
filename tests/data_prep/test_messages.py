"""Check that no character of a foreign string controls a terminal."""

import sys
import unicodedata

import pytest

from data_prep.messages import one_line, printable


def test_no_code_point_reaches_a_terminal_unless_it_shows_as_itself() -> None:
    for start in range(0, sys.maxunicode + 1, 256):
        block = [chr(number) for number in range(start, start + 256)]
        shown = "".join(c for c in block if unicodedata.category(c)[0] in "LMNPS")
        assert printable(shown) == shown, hex(start)
        assert printable("".join(block)).replace("\n", "").isprintable(), hex(start)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;owned\x07", r"\x1b]0;owned\x07"),
        ("a\u202eb\u200d\x9b", r"a\u202eb\u200d\x9b"),
        ("caf\u00e9 \u4e2d", "caf\u00e9 \u4e2d"),
        ("a\tb\u00a0c\nd", "a b c\nd"),
        ("\udc80", r"\udc80"),
    ],
    ids=["title-of-the-window", "direction", "words", "blanks", "no-utf-8"],
)
def test_what_does_not_show_is_spelt_out(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert one_line(text) == " ".join(shown.split())


def test_a_line_has_a_limit() -> None:
    assert one_line("word " * 100, 20) == "word word word wo..."
