"""Read plain text: a document per file, paragraph, line or sentence; or runs of lines."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import PurePath
from typing import ClassVar, Literal

from pydantic import field_validator

from data_prep.sources.document import Document, Rejected
from data_prep.sources.files import LONG_LINE, Piece, file_chunks, lines
from data_prep.sources.kind import FileSource
from data_prep.text.cleaning import clean

SHORTEST, LONGEST = 20, 300  # characters of a sentence; shorter and longer pieces are left out
_ENDS = (".", "!", "?", "。", "！", "？", "।", "؟")  # noqa: RUF001
# A sentence ends before a space and a capital letter A-Z or of Russian's alphabet, and where
# Chinese, Japanese and Hindi end it. Other capitals, opening quotes and marks do not begin one.
_BORDER = re.compile(r"(?<=[.!?]) +(?=[A-Z\u0410-\u042f])|(?<=[。！？।؟]) *")  # noqa: RUF001


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of each line of a text; no headings and no lines without an end.

    "J. S. Bach" is cut after each point. Encoders are distilled from such text without labels,
    where a cut in a wrong place costs nothing.
    """
    for line in clean(text).splitlines():
        for sentence in _BORDER.split(line):
            if sentence.endswith(_ENDS) and SHORTEST <= len(sentence) <= LONGEST:
                yield sentence


_PATTERNS = ("*.txt", "*.txt.gz", "*.txt.bz2", "*.txt.zst")
PART = 1 << 22  # bytes; a longer document goes on as the next one, so memory is bounded
CELL = 1 << 20  # bytes; see `_runs`
_SENTENCES = 1000  # lines after which a run of sentences is a document

# The lines of a document with their offsets; a line that is too long is None, alone in its run.
Run = list[tuple[int, bytes | None]]


class Text(FileSource):
    """Read UTF-8 text files; `document` says what one document is."""

    patterns: ClassVar[tuple[str, ...]] = _PATTERNS
    by_range: ClassVar[bool] = True

    kind: Literal["text"] = "text"
    document: Literal["file", "line", "paragraph", "sentence"] = "file"
    """What is a document."""

    @field_validator("path")
    @classmethod
    def _no_table(cls, path: str) -> str:
        for kind in ("csv", "tsv"):
            if f".{kind}" in PurePath(path).suffixes:
                raise ValueError(f"is a table of records: take kind: {kind} and text_field")
        return path

    def cut(self, file: Piece, limit: int) -> list[Piece]:
        """Return a file whole if it is one document, else a plain one in ranges of bytes."""
        return [file] if self.document == "file" else super().cut(file, limit)

    def documents(self, piece: Piece) -> Iterator[Document | Rejected]:
        """Yield the documents that begin in a piece; a long file is cut about every PART bytes."""
        name = self.input_name(piece)
        if self.document == "line":
            for offset, line in lines(piece.path, piece.start, piece.end):
                if line is None or line.strip():
                    yield _decoded([(offset, line)], name)
        elif self.document == "sentence":
            for offset, line in lines(piece.path, piece.start, piece.end):
                if line is None or line.strip():
                    yield from cut(_decoded([(offset, line)], name))
        elif self.document == "paragraph":
            for run in _runs(piece, max_lines=None):
                yield _decoded(run, name)
        else:
            # Read twice: a bad byte at the end must reject the file before its start is out.
            check = codecs.getincrementaldecoder("utf-8")()
            read = 0
            try:
                for chunk in file_chunks(piece.path):
                    if b"\0" in chunk:
                        yield Rejected(name, "binary", f"NUL byte at byte {read + chunk.index(0)}")
                        return
                    check.decode(chunk)
                    read += len(chunk)
                check.decode(b"", final=True)
            except UnicodeDecodeError as error:
                yield Rejected(name, "not utf-8", f"{error.reason} near byte {read}")
                return
            found = False
            for offset, part in _parts(piece.path):
                text = part.removeprefix(codecs.BOM_UTF8 if offset == 0 else b"").decode()
                if text.strip():
                    yield Document(text, f"{name}@{offset}" if offset else name)
                    found = True
            if not found:
                yield Rejected(name, "empty")


def cut(item: Document | Rejected) -> Iterator[Document | Rejected]:
    """Yield each sentence of a document; its id has the sentence's number."""
    if isinstance(item, Rejected):
        yield item
        return
    for number, sentence in enumerate(sentences(item.text)):
        yield replace(item, text=sentence, id=f"{item.id}.{number}")


class Sentences(FileSource):
    """Read UTF-8 files of one sentence a line; a blank line starts a new document."""

    patterns: ClassVar[tuple[str, ...]] = _PATTERNS
    by_range: ClassVar[bool] = True
    by_line: ClassVar[bool] = True

    kind: Literal["sentences"] = "sentences"

    def documents(self, piece: Piece) -> Iterator[Document | Rejected]:
        """Yield runs of sentences, at most 1,000 lines each; only the bad line is rejected."""
        name = self.input_name(piece)
        for run in _runs(piece, max_lines=_SENTENCES):
            result = _decoded(run, name)
            if isinstance(result, Document) or len(run) == 1:
                yield result
                continue
            results = [_decoded([sentence], name) for sentence in run]
            yield from (bad for bad in results if isinstance(bad, Rejected))
            if good := [sentence for sentence in results if isinstance(sentence, Document)]:
                yield Document("\n".join(sentence.text for sentence in good), good[0].id)


def _runs(piece: Piece, *, max_lines: int | None) -> Iterator[Run]:
    """Yield runs of lines that are not blank.

    A piece owns the runs from its first border up to the first border past its end. No run crosses
    a border. Borders are the file's beginning and blank lines. To cut a file without blank lines,
    too, the first line to begin at or after a multiple of CELL is a border if no blank line begins
    in the CELL bytes before that. All of this depends only on the file, not on pieces.
    """
    start, end = piece.start, piece.end
    mine = False
    run: Run = []
    # The cell before the piece's first decides whether that begins with a border.
    first = max(0, start // CELL * CELL - CELL)
    last_cell, blank_cell = first // CELL - 1, -1
    for offset, line in lines(piece.path, first, end, on=True):
        cell = offset // CELL
        blank = line is not None and not line.strip()
        # A cell in which no line begins has no blank one.
        unbroken = cell > last_cell and (blank_cell != last_cell or cell > last_cell + 1)
        border = offset == 0 or blank or unbroken
        last_cell, blank_cell = cell, cell if blank else blank_cell
        # Past its end, a piece reads on to complete its last run, which the next piece skips.
        behind = end is not None and offset >= end
        if behind and (border or not mine):
            break
        mine = mine or (border and offset >= start)
        if not mine:
            continue
        if run and (border or blank or line is None or len(run) == max_lines):
            yield run
            run = []
        if line is None:
            yield [(offset, None)]
        elif not blank:
            run.append((offset, line))
    if run:
        yield run


def _parts(path: str) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, bytes) of a file's parts of about PART bytes, cut at line ends if possible."""
    held: list[bytes] = []
    offset = size = 0
    for chunk in file_chunks(path):
        held.append(chunk)
        size += len(chunk)
        if size >= PART:
            part = b"".join(held)
            # After the last line end, else the last space, else between characters.
            end = (
                part.rfind(b"\n") + 1
                or part.rfind(b" ") + 1
                or next(at for at in range(len(part) - 1, -1, -1) if part[at] & 0xC0 != 0x80)
            )
            yield offset, part[:end]
            held, size, offset = [part[end:]], len(part) - end, offset + end
    yield offset, b"".join(held)


def _decoded(run: Run, name: str) -> Document | Rejected:
    """Return the lines of a run as one document."""
    where = f"{name}@{run[0][0]}"
    if run[0][1] is None:
        return Rejected(where, "too long", LONG_LINE)
    raw = b"\n".join(line for _, line in run if line is not None)
    if b"\0" in raw:
        return Rejected(where, "binary", f"NUL byte at byte {raw.index(0)} of it")
    try:
        return Document(raw.decode("utf-8"), where)
    except UnicodeDecodeError as error:
        return Rejected(where, "not utf-8", f"{error.reason} at byte {error.start} of it")
