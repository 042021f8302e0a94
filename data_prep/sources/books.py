"""Books as plain text files, such as Project Gutenberg's, without its header and footer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

import charset_normalizer

from data_prep.sources.document import Document, FileSource, Rejected
from data_prep.sources.files import chunks, list_files, relative_name

_BOOK_LIMIT = 1 << 26  # bytes; the longest books of Project Gutenberg have under 20 MB
_HEADER_REACH = 60_000  # characters in which a header ends
_STARTS = (
    re.compile(
        r"^\**[ \t]*\*\*\*? ?START OF (?:THE|THIS) PROJECT GUTENBERG(?:.*\n){0,2}?.*\*\*\*.*\n",
        re.M,
    ),
    re.compile(r"^\*END[ *]*THE SMALL PRINT!.*\n", re.M),
)
# The sentence forms stand on their own line before the starred footer, or instead of it.
_END = re.compile(
    r"^[ \t]*(?:\*\*\*? ?END OF (?:THE|THIS) PROJECT GUTENBERG"
    r"|(?:End|This is the end|END) of (?:the |this )?(?:Project )?Gutenberg(?:'s|\b)).*",
    re.M | re.IGNORECASE,
)
_TITLE = re.compile(r"^Title:[ \t]*(\S.*(?:\n[ \t]+\S.*)*)", re.M)
# Who made the electronic text: the first paragraphs after a header, of no worth as prose.
_CREDIT = re.compile(
    r"\A\s*(?:Produced by|E-?text prepared by|This e-?text was (?:produced|prepared)|Prepared by|"
    r"Transcribed (?:from|by)|Scanned by|Credits?:|\[?Transcriber'?s? note|Note: |"
    r"This file was produced|This updated e-?text|HTML version by|.*Project Gutenberg)"
    r"(?:.+\n)*.*(?:\n|\Z)",
    re.IGNORECASE,
)
_ILLUSTRATION = re.compile(r"\[(?:Illustration|Frontispiece)[^\[\]]{0,500}\]", re.IGNORECASE)


class Books(FileSource):
    """A folder of .txt files, a book each; hard-wrapped paragraphs become one line each."""

    kind: Literal["books"] = "books"


def inputs(source: Books) -> list[str]:
    """The books' files; CorpusError if there are none."""
    return list_files(source.path, ("*.txt", "*.txt.gz", "*.txt.bz2", "*.txt.zst"))


def read(source: Books, input: str) -> Iterator[Document | Rejected]:
    """One book; rejected if it is binary, empty or longer than 64 MiB."""
    name = relative_name(source.path, input)
    pieces: list[bytes] = []
    size = 0
    for chunk in chunks(input):
        pieces.append(chunk)
        size += len(chunk)
        if size > _BOOK_LIMIT:
            yield Rejected(name, "too long", f"more than {_BOOK_LIMIT} bytes; use kind: text")
            return
    decoded = _decode(b"".join(pieces))
    if decoded is None:
        yield Rejected(name, "binary", "no text in a known encoding")
        return
    text, title = without_licence(decoded.replace("\r\n", "\n").replace("\r", "\n"))
    text = unwrapped(text)
    yield Document(text, name, title) if text else Rejected(name, "empty")


def without_licence(text: str) -> tuple[str, str]:
    """The book between Project Gutenberg's header and footer, and its title ("" if unnamed).

    A text without them is returned whole.
    """
    title = ""
    for start in _STARTS:
        if header := start.search(text, 0, _HEADER_REACH):
            if found := _TITLE.search(text, 0, header.start()):
                title = " ".join(found[1].split())
            text = text[header.end() :]
    # A book may quote the phrase, so only its last tenth or 50,000 characters can be the footer.
    if footer := _END.search(text, min(len(text) * 9 // 10, max(0, len(text) - 50_000))):
        text = text[: footer.start()]
    while credit := _CREDIT.match(text):
        text = text[credit.end() :]
    return text, title


def unwrapped(text: str) -> str:
    """Paragraphs, separated by blank lines, each on one line; verse and tables keep their lines."""
    text = _ILLUSTRATION.sub("", text)
    paragraphs = []
    for block in re.split(r"\n[ \t]*(?:\n[ \t]*)+", text):
        lines = [line for line in block.split("\n") if line.strip()]
        if not any(map(str.isalnum, block)):
            continue
        # Verse, contents and tables begin their lines with a capital or are set in; prose does not.
        starts = [line.lstrip(" \t\"'_([\u2018\u201c")[:1] for line in lines]
        capitals = sum(start.isupper() or start.isdigit() for start in starts)
        indented = all(line.startswith((" ", "\t")) for line in lines)
        apart = (len(lines) > 2 and capitals > 0.7 * len(lines)) or (len(lines) > 1 and indented)
        joint = "\n" if apart else " "
        paragraphs.append(joint.join(line.strip() for line in lines))
    return "\n\n".join(paragraphs)


def _decode(raw: bytes) -> str | None:
    guess = "utf-16" if raw.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    if guess != "utf-16" and b"\0" in raw:
        return None
    # cp1252 before any detection: it is what old books are in, and a detector takes a French text
    # for Central European more often than a book is in neither.
    for encoding in (guess, "cp1252"):
        try:
            return raw.decode(encoding)
        except UnicodeDecodeError:
            continue
    best = charset_normalizer.from_bytes(raw[:_HEADER_REACH]).best()
    try:
        return raw.decode(best.encoding) if best is not None else None
    except UnicodeDecodeError:
        return None
