"""Read books as plain text files, such as Project Gutenberg's, without licences and notes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import ClassVar, Literal

import charset_normalizer

from data_prep.sources.document import SKIPPED, Document, Rejected, begins
from data_prep.sources.files import Piece, file_chunks
from data_prep.sources.kind import FileSource

_BOOK_LIMIT = 1 << 26  # bytes; the longest books of Project Gutenberg have under 20 MB
_HEADER_REACH = 60_000  # characters in which a header ends
_FRONT, _BACK = 12_000, 25_000  # characters in which notes of the electronic edition stand
_SECTION = 6_000  # characters; the longest such note at a book's beginning has 4,900
_START = re.compile(
    r"^\**[ \t]*\*\*\*? ?START OF (?:THE|THIS) PROJECT GUTENBERG(?:.*\n){0,2}?.*\*\*\*.*\n", re.M
)
_SMALL_PRINT_END = re.compile(r"^\*END[ *]*THE SMALL PRINT!.*\n", re.M)
# The sentence forms have their own line before the starred footer, or replace it.
_END = re.compile(
    r"^[ \t]*(?:\*\*\*? ?END OF (?:THE|THIS) PROJECT GUTENBERG"
    r"|(?:End|This is the end|END) of (?:the |this )?(?:Project )?Gutenberg(?:'s|\b)).*",
    re.M | re.IGNORECASE,
)
# What comes after a book of 2003 or older, before that footer.
_APPENDIX = re.compile(
    r"^[ \t*]*(?:The Project Gutenberg E-?(?:text|book) of|START\**THE SMALL PRINT"
    r"|The Legal Small Print|This file should be named).*",
    re.M | re.IGNORECASE,
)
_TITLE = re.compile(r"Title:[ \t]*(\S.*(?:\n[ \t]+\S.*)*)")
_GAP = re.compile(r"(\n(?:[ \t]*\n)+)")
# Paragraphs on who made the electronic text and how: these openings, or ...
_CREDIT = re.compile(
    r"\s*(?:\[?(?:Produced|Transcribed|Digiti[sz]ed|Scanned|HTML version|Prepared)"
    r"(?: and \w+)? (?:by|from)\b|Credits?:|\[?Transcriber['\u2019]?s?['\u2019]? note"
    r"|Note from the original file|Special thanks are due|This file was produced"
    r"|(?:The|A) Millennium Fulcrum Edition|Copyright \(C\) (?:199|20)\d\d|cover\s*\Z"
    r"|We thank the Biblioth|Nous remercions la Biblioth|Cette version \u00e9lectronique)",
    re.IGNORECASE,
)
# ... these words, in a short one.
_ELECTRONIC = re.compile(
    r"project gutenberg|\be-?(?:text|book)s?\b|\belectronic (?:text|book|edition|version)s?\b"
    r"|\btranscriber['\u2019]?s?['\u2019]? note",
    re.IGNORECASE,
)
# A heading above more of the kind.
_NOTES = re.compile(
    r"\W*(?:(?:original )?(?:transcriber|preparer|proofreader|e-?text editor)['\u2019]?s?['\u2019]?"
    r" (?:end)?(?:notes?|bookmarks?)\b.*|(?:typographical )?errors corrected by .*"
    r"|preface to the project gutenberg.*|liste des modifications\W*)(?:\n\W*)?",
    re.IGNORECASE,
)
# Pictures' captions, and notes of those who made the electronic text.
_BRACKETED = re.compile(
    r"\[ ?(?:Illustration|Frontispiece|Picture|(?:Transcriber|Updater)['\u2019]?s note)"
    r"(?:[^\[\]]|\[[^\[\]]{0,200}\]){0,500}\]",
    re.IGNORECASE,
)
# Numbers of pages, notes and pictures: [Pg 12] [p.xii] [12] [FN#12] word[A] {12} {pg 12}, and on
# lines of their own 12 (return) and 0012m. Not [1914], [a], x_{12} nor { 9}.
_MARK = re.compile(
    r"\[(?:(?:Pg|Page|p\.)\.? ?[\dxvilc]{1,7}|(?:FN ?#? ?)?\d{1,3})\]"
    r"|\[(?<=[\w.,;:!?\"'\u2019\u201d)]\[)[A-Z]\](?!\w)|\{(?<![\w^_}]\{)(?:pg ?|p\. ?)?\d{1,4}\}"
)
_NUMBERED = re.compile(r"^[ \t]*(?:\d{1,4} \(return\)(?: \[)?|\d{4}m[ \t]*$)", re.M)
_ITALICS = re.compile(r"(?<![\w_])_(?=\S)([^_]{1,1000})(?<=\S)_(?![\w_])")
_CHARACTER_SET = re.compile(rb"^Character set encoding:[ \t]*(.+)", re.M)
_KNOWN_SET = re.compile(r"iso_8859_|windows_|cp\d|mac|koi8|big5|gb|euc|shift")
_CONTROLS = re.compile("[\x80-\x9f]")


class Books(FileSource):
    """Read a folder of .txt files, a book each; hard-wrapped paragraphs become one line each."""

    patterns: ClassVar[tuple[str, ...]] = ("*.txt", "*.txt.gz", "*.txt.bz2", "*.txt.zst")

    kind: Literal["books"] = "books"

    def documents(self, piece: Piece) -> Iterator[Document | Rejected]:
        """Yield one book, rejected if it is binary, empty or longer than 64 MiB.

        Notes of a book that is kept: "cut short" (Project Gutenberg's header, but no footer),
        "decoded as cp1252" (or another encoding that is not Unicode), "cp1252 within utf-8"
        (repaired), "lost characters" (U+FFFD: lost before).
        """
        name = self.input_name(piece)
        if not begins(name):
            yield Rejected(name, SKIPPED)
            return
        held: list[bytes] = []
        size = 0
        for chunk in file_chunks(piece.path):
            held.append(chunk)
            size += len(chunk)
            if size > _BOOK_LIMIT:
                yield Rejected(name, "too long", f"more than {_BOOK_LIMIT} bytes; use kind: text")
                return
        decoded = _decoded(b"".join(held))
        if decoded is None:
            yield Rejected(name, "binary", "no text in a known encoding")
            return
        text, notes = decoded
        text, title, complete = without_licence(text.replace("\r\n", "\n").replace("\r", "\n"))
        text = unwrapped(without_credits(text))
        if not complete:
            notes = (*notes, "cut short")
        yield Document(text, name, title, notes=notes) if text else Rejected(name, "empty")


def without_licence(text: str) -> tuple[str, str, bool]:
    """Return the book between Project Gutenberg's header and footer, its title, and if it is whole.

    A text without them is returned whole; one with a header only is not. No title: "".
    """
    title = ""
    begun = ended = False
    # The small print is last, because later books have it in the footer.
    for mark, opens in (
        *((_START, True), (_END, False)),
        *((_APPENDIX, False), (_SMALL_PRINT_END, True)),
    ):
        if opens:
            if header := mark.search(text, 0, _HEADER_REACH):
                if not title and (found := _TITLE.search(text, 0, header.start())):
                    title = " ".join(found[1].split())
                text, begun = text[header.end() :], True
        elif begun or mark is not _APPENDIX:
            # A book may quote the phrase: only its last tenth or 50,000 characters can be these.
            reach = min(len(text) * 9 // 10, max(0, len(text) - 50_000))
            if footer := mark.search(text, reach):
                text, ended = text[: footer.start()], True
    return text, title, ended or not begun


def without_credits(text: str) -> str:
    """Remove pictures' captions and notes on the electronic edition from a book.

    Captions are in brackets anywhere; notes also stand near the beginning or the end.
    """
    text = _BRACKETED.sub("", text)
    front = min(_FRONT, len(text) // 2)
    back = max(front, len(text) - _BACK)
    # Each region ends at a paragraph's end.
    front, back = (max(0, text.rfind("\n\n", 0, at)) for at in (front, back))

    parts = _GAP.split(text[:front])  # paragraph, gap, paragraph, ...
    kept: list[str] = []
    i = 0
    while i < len(parts):
        if _NOTES.fullmatch(parts[i].strip()):
            # Under a heading, paragraphs go up to a gap of two blank lines, else the first does.
            size, begin, i = 0, i + 2, i + 4
            for j in range(begin, len(parts) - 1, 2):
                size += len(parts[j])
                if size > _SECTION:
                    break
                if parts[j + 1].count("\n") > 2:
                    i = j + 2
                    break
        else:
            if not _is_note(parts[i]):
                kept += parts[i : i + 2]
            i += 2
    kept.append(text[front:back])
    parts = _GAP.split(text[back:])
    for i in range(0, len(parts), 2):
        if _NOTES.fullmatch(parts[i].strip()):
            break
        if not _is_note(parts[i]):
            kept += parts[i : i + 2]
    return "".join(kept)


def _is_note(paragraph: str) -> bool:
    short = len(paragraph) < 1500
    return short and bool(_CREDIT.match(paragraph) or _ELECTRONIC.search(paragraph))


def unwrapped(text: str) -> str:
    """Put each paragraph (blank lines separate them) on one line; verse and tables keep their
    lines.

    Without the numbers of pages and notes, and without the underscores of italics.
    """
    text = _NUMBERED.sub("", _MARK.sub("", text))
    indents = Counter(len(line) - len(line.lstrip()) for line in text.split("\n") if line.strip())
    margin = max(indents, key=lambda indent: (indents[indent], -indent), default=0)
    paragraphs = []
    for block in _GAP.split(text)[::2]:
        lines = [line for line in block.split("\n") if line.strip()]
        if not any(map(str.isalnum, block)):
            continue
        # Verse, contents and tables begin their lines with a capital or are set in; prose does not.
        starts = [line.lstrip(" \t\"'_([\u2018\u201c")[:1] for line in lines]
        capitals = sum(start.isupper() or start.isdigit() for start in starts)
        indented = all(len(line) - len(line.lstrip()) > margin for line in lines)
        apart = (len(lines) > 2 and capitals > 0.7 * len(lines)) or (len(lines) > 1 and indented)
        joint = "\n" if apart else " "
        paragraphs.append(_ITALICS.sub(r"\1", joint.join(line.strip() for line in lines)))
    return "\n\n".join(paragraphs)


def _decoded(raw: bytes) -> tuple[str, tuple[str, ...]] | None:
    """Return the text and notes on its encoding; None if it is not text."""
    guess = "utf-16" if raw.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    if guess != "utf-16" and b"\0" in raw:
        return None
    try:
        text = raw.decode(guess)
    except UnicodeDecodeError:
        pass
    else:
        notes: list[str] = []
        if _CONTROLS.search(text):
            # Bytes of cp1252 once taken for Latin-1, and so written as UTF-8.
            text = _CONTROLS.sub(lambda c: c[0].encode("latin-1").decode("cp1252", "ignore"), text)
            notes.append("cp1252 within utf-8")
        if "\ufffd" in text:
            notes.append("lost characters")
        return text, tuple(notes)

    # Not UTF-8: as the header says, else as cp1252, which old books are in, else as detected. A
    # header is only asked now because it often outlives a conversion to UTF-8; and a detector
    # takes a French text for Central European more often than a book is in neither.
    candidates = ["cp1252"]
    if stated := _CHARACTER_SET.search(raw[:_HEADER_REACH]):
        name = re.sub(r"[^a-z0-9]+", "_", stated[1].decode("ascii", "ignore").lower()).strip("_")
        # What calls itself Latin-1 is cp1252 wherever the two differ, as on the web.
        if _KNOWN_SET.match(name) and name != "iso_8859_1":
            candidates.insert(0, name)
    for encoding in candidates:
        try:
            return raw.decode(encoding), (f"decoded as {encoding}",)
        except (UnicodeDecodeError, LookupError):
            continue
    best = charset_normalizer.from_bytes(raw[:_HEADER_REACH]).best()
    try:
        return (
            None if best is None else (raw.decode(best.encoding), (f"decoded as {best.encoding}",))
        )
    except UnicodeDecodeError:
        return None
