"""Plain text: a document a file, a line or a paragraph; or one sentence a line (BookCorpus)."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import Literal

from data_prep.sources.document import Document, FileSource, Rejected
from data_prep.sources.files import chunks, lines, list_files, relative_name

PATTERNS = ("*.txt", "*.txt.gz", "*.txt.bz2", "*.txt.zst")
PIECE = 1 << 22  # characters; a longer document goes on as the next one, so memory is bounded
_SENTENCES = 1000  # lines after which a run of sentences is a document


class Text(FileSource):
    """UTF-8 text files; `document` says what one document is."""

    kind: Literal["text"] = "text"
    document: Literal["file", "line", "paragraph"] = "file"


class Sentences(FileSource):
    """UTF-8 files of one sentence a line; a blank line starts a new document."""

    kind: Literal["sentences"] = "sentences"


def inputs(source: Text | Sentences) -> list[str]:
    """Text files, plain or compressed; CorpusError if there are none."""
    return list_files(source.path, PATTERNS)


def read_text(source: Text, input: str) -> Iterator[Document | Rejected]:
    """The documents of one text file; a whole file above PIECE characters is cut at a line end."""
    name = relative_name(source.path, input)
    if source.document == "file":
        yield from _read_file(input, name)
    elif source.document == "line":
        for number, line in lines(input):
            if line is None or line.strip():
                yield _decoded(line, f"{name}#{number}")
    else:
        for number, paragraph in _runs(input, max_lines=None):
            yield _decoded(paragraph, f"{name}#{number}")


def read_sentences(source: Sentences, input: str) -> Iterator[Document | Rejected]:
    """Runs of sentences, one a line, of at most 1,000 lines; a bad line is rejected alone."""
    name = relative_name(source.path, input)
    for number, run in _runs(input, max_lines=_SENTENCES):
        result = _decoded(run, f"{name}#{number}")
        if isinstance(result, Document) or run is None:
            yield result
            continue
        results = [_decoded(s, f"{name}#{number + i}") for i, s in enumerate(run.split(b"\n"))]
        yield from (bad for bad in results if isinstance(bad, Rejected))
        if good := [sentence for sentence in results if isinstance(sentence, Document)]:
            yield Document("\n".join(sentence.text for sentence in good), good[0].id)


def _read_file(input: str, name: str) -> Iterator[Document | Rejected]:
    # Read twice: a bad byte at the end must reject the file before its start is out.
    check = codecs.getincrementaldecoder("utf-8")()
    read = 0
    try:
        for chunk in chunks(input):
            if b"\0" in chunk:
                yield Rejected(name, "binary", f"NUL byte near byte {read + chunk.index(0)}")
                return
            check.decode(chunk)
            read += len(chunk)
        check.decode(b"", final=True)
    except UnicodeDecodeError as error:
        yield Rejected(name, "not utf-8", f"{error.reason} near byte {read}")
        return
    found = False
    for part, text in enumerate(_pieces(input)):
        if text.strip():
            yield Document(text, name if part == 0 else f"{name}#{part}")
            found = True
    if not found:
        yield Rejected(name, "empty")


def _pieces(input: str) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    held: list[str] = []
    size = 0
    for chunk in chunks(input):
        held.append(decoder.decode(chunk))
        size += len(held[-1])
        if size >= PIECE:
            text = "".join(held)
            # The last line end, else the last space, else right here (a text with neither).
            cut = text.rfind("\n") + 1 or text.rfind(" ") + 1 or len(text)
            yield text[:cut]
            held, size = [text[cut:]], len(text) - cut
    yield "".join([*held, decoder.decode(b"", final=True)])


def _runs(input: str, *, max_lines: int | None) -> Iterator[tuple[int, bytes | None]]:
    """(first line number, lines joined by a newline) of runs of lines that are not blank."""
    start, size = 1, 0
    held: list[bytes] = []
    for number, line in lines(input):
        full = len(held) == max_lines or size > PIECE
        if held and (full or line is None or not line.strip()):
            yield start, b"\n".join(held)
            held, size = [], 0
        if line is None:
            yield number, None
        elif line.strip():
            start = start if held else number
            held.append(line)
            size += len(line)
    if held:
        yield start, b"\n".join(held)


def _decoded(raw: bytes | None, where: str) -> Document | Rejected:
    if raw is None:
        return Rejected(where, "too long", "a line of more than 64 MiB")
    if b"\0" in raw:
        return Rejected(where, "binary", f"NUL byte at byte {raw.index(0)} of it")
    try:
        return Document(raw.decode("utf-8"), where)
    except UnicodeDecodeError as error:
        return Rejected(where, "not utf-8", f"{error.reason} at byte {error.start} of it")
