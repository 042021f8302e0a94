"""Normalise text: one form for characters, spaces and line ends."""

from __future__ import annotations

import re
import unicodedata


def _table() -> dict[int, str | None]:
    """Code point -> what replaces it (None: dropped), for str.translate."""
    table: dict[int, str | None] = {}
    for code in range(0x10000):
        category = unicodedata.category(chr(code))
        if category == "Zs":
            table[code] = " "
        elif category in ("Zl", "Zp"):
            table[code] = "\n"
        elif category in ("Cc", "Cs"):
            table[code] = None
    # Zero-width space, word joiner, soft hyphen, BOM and the marks of writing direction carry no
    # text; joiners (U+200C, U+200D) do: Persian, Indic scripts and emoji are spelt with them.
    for code in (0xAD, 0x180E, 0x200B, 0x200E, 0x200F, 0x2060, 0xFEFF):
        table[code] = None
    table.update({code: None for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))})
    table.update({ord("\t"): " ", ord("\n"): "\n", ord("\r"): "\n", 0x85: "\n"})
    table.update({0x0B: "\n", 0x0C: "\n"})
    return table


_CHARACTERS = _table()
# NFC takes quadratic time over a run of combining marks; Unicode's own limit (UAX 15) is 30.
_MARKS = "".join(filter(unicodedata.combining, map(chr, range(0x20000))))
_LONG_RUN = re.compile(f"([{_MARKS}]{{30}})[{_MARKS}]{{34,}}")
_EVERY = 16  # characters: a run of 64 has at least three of those that are looked at
_SUSPECT = re.compile(f"[{_MARKS}]{{3}}")
_SPACES_AROUND_LINE_END = re.compile(r" *\n *")
_SPACES = re.compile(r"  +")
_BLANK_LINES = re.compile(r"\n{3,}")


def clean(text: str) -> str:
    r"""Text in NFC without control or zero-width characters, lone surrogates or spare spaces.

    Lines end in "\n" and are stripped, at most one blank line stands between two, and of more than
    63 combining marks in a row 30 stay. Idempotent, and the result can always be encoded as UTF-8.
    """
    if text.isascii() and text.isprintable() and "  " not in text:
        return text.strip(" ")
    text = text.replace("\r\n", "\n").translate(_CHARACTERS)
    if _SUSPECT.search(text[::_EVERY]):
        text = _LONG_RUN.sub(r"\1", text)
    text = unicodedata.normalize("NFC", text)
    text = _SPACES.sub(" ", text)
    text = _SPACES_AROUND_LINE_END.sub("\n", text)
    return _BLANK_LINES.sub("\n\n", text).strip("\n ")
