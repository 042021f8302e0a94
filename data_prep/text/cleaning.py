"""Normalise text: one form for characters, spaces and line ends."""

from __future__ import annotations

import re
import unicodedata

_BY_CATEGORY = {"Zs": " ", "Zl": "\n", "Zp": "\n", "Cc": None, "Cs": None}
# Zero-width space, word joiner, soft hyphen, BOM and the marks of writing direction carry no text;
# joiners (U+200C, U+200D) do: Persian, Indic scripts and emoji are spelt with them.
_NO_TEXT = (0xAD, 0x180E, 0x200B, 0x200E, 0x200F, 0x2060, 0xFEFF)
# Code points -> what replaces them (None: dropped), for str.translate.
_CHARACTERS = {
    code: _BY_CATEGORY[category]
    for code in range(0x10000)
    if (category := unicodedata.category(chr(code))) in _BY_CATEGORY
}
_CHARACTERS |= dict.fromkeys((*_NO_TEXT, *range(0x202A, 0x202F), *range(0x2066, 0x206A)))
_CHARACTERS |= dict.fromkeys((0x0A, 0x0B, 0x0C, 0x0D, 0x85), "\n") | {0x09: " "}
_REPLACED = [chr(code) for code, to in _CHARACTERS.items() if to != chr(code)]
_TO_REPLACE = re.compile(f"[{re.escape(''.join(_REPLACED))}]+")
# NFC takes quadratic time over a run of combining marks; Unicode's own limit (UAX 15) is 30. `re`
# is fast for characters below U+10000 and for one range: the first pattern finds candidates that
# way, the second distinguishes marks from letters in them.
_MARKS = [chr(code) for code in range(0x1F000) if unicodedata.combining(chr(code))]
_SUSPECTS = "".join(mark for mark in _MARKS if mark < "\U00010000") + "\U00010000-\U0001efff"
_SUSPECT_RUN = re.compile(f"[{_SUSPECTS}][{_SUSPECTS}]{{63,}}")
_LONG_RUN = re.compile(f"[{''.join(_MARKS)}]{{64,}}")
_SPACES_AROUND_LINE_END = re.compile(r" *\n *")
_SPACES = re.compile(r"  +")
_BLANK_LINES = re.compile(r"\n{3,}")


def clean(text: str) -> str:
    r"""Return text in NFC without control or zero-width characters, lone surrogates or spare
    spaces.

    Lines end in "\n" and are stripped, with at most one blank line between two. Of more than 63
    combining marks in a row 30 stay. Idempotent, and the result can always be encoded as UTF-8.
    """
    if text.isascii() and text.isprintable() and "  " not in text:
        return text.strip(" ")
    text = text.replace("\r\n", "\n")
    # A pattern that finds what to replace is ten times as fast as translating everything.
    text = _TO_REPLACE.sub(lambda found: found[0].translate(_CHARACTERS), text)
    if not text.isascii():
        if _SUSPECT_RUN.search(text):
            text = _LONG_RUN.sub(lambda run: run[0][:30], text)
        text = unicodedata.normalize("NFC", text)
    if "  " in text:
        text = _SPACES.sub(" ", text)
    if " \n" in text or "\n " in text:
        text = _SPACES_AROUND_LINE_END.sub("\n", text)
    if "\n\n\n" in text:
        text = _BLANK_LINES.sub("\n\n", text)
    return text.strip("\n ")
