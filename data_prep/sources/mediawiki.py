"""Read MediaWiki XML dumps as a stream.

Multistream dumps consist of bz2 streams of 100 pages each, found by the index or by a scan.
"""

from __future__ import annotations

import bz2
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import ClassVar, Literal
from urllib.parse import quote
from xml.parsers import expat

from data_prep import CorpusError
from data_prep.messages import one_line
from data_prep.sources import remote
from data_prep.sources.document import SKIPPED, Document, Rejected, begins
from data_prep.sources.files import Piece, byte_ranges, file_chunks, is_compressed, lines, opened
from data_prep.sources.kind import FileSource
from data_prep.text.wikipedia import plain_text

FIX = "download dump and index again, or remove the index"
_DUMP = re.compile(r"(.*-multistream)(\d*)\.xml(-p\d+p\d+)?\.bz2")
INDEX = re.compile(r".*-multistream-index\d*\.txt(-p\d+p\d+)?(\.bz2)?")
_MAGIC, _SEEN = 10, 64  # bytes of a stream's begin, and of text that shows what it begins with
_NO_SECOND = 1 << 25  # bytes without another stream
_STREAM = re.compile(rb"BZh[1-9]1AY&SY")  # a header and the magic of a block, the digits of pi


def stream_ranges(file: Piece, limit: int) -> list[Piece]:
    """Divide a dump into pieces of at least `limit` bytes, each beginning with a bz2 stream.

    Returns none if it has one stream, or if there is no index next to one in a store, which would
    move twice. Raises CorpusError if the index does not fit the dump.
    """
    index = index_of(file)
    if index and file.size <= limit:
        return [file]
    if index:
        return _pieces(file, _by_index(file, index, limit))
    if file.size <= limit or remote.is_remote(file.path) or not file.path.endswith(".bz2"):
        return []
    return _pieces(file, _by_scan(file, limit))


def index_of(file: Piece) -> str:
    """Return the path of the index next to a dump; "" without one."""
    if not (name := _DUMP.fullmatch(file.path)):
        return ""
    index = f"{name[1]}-index{name[2]}.txt{name[3] or ''}.bz2"
    there = remote.exists(index) if remote.is_remote(index) else os.path.isfile(index)
    return index if there else ""


def _pieces(file: Piece, borders: list[int]) -> list[Piece]:
    if not borders:
        return []
    pieces = [Piece(file.path, a, b, b - a) for a, b in pairwise(borders)]
    return [*pieces, Piece(file.path, borders[-1], None, file.size - borders[-1])]


def _by_scan(file: Piece, limit: int) -> list[int]:
    """Return where pieces begin, at streams that begin with a page; none of a single stream.

    Other programs' streams (pbzip2) begin anywhere in a page. 32 MiB without a second stream that
    does not count as a dump of one.
    """
    borders, at, held = [0], 0, b""
    with open(file.path, "rb") as stored:
        while chunk := stored.read(1 << 20):
            data = held + chunk
            for found in _STREAM.finditer(data):
                place = at + found.start()
                if place - borders[-1] < limit:
                    continue
                if not _begins_with_page(file.path, place):
                    return []
                borders.append(place)
            held = data[-_MAGIC + 1 :]
            at += len(data) - len(held)
            if len(borders) == 1 and at > limit + _NO_SECOND:
                break
    return borders if len(borders) > 1 else []


def _begins_with_page(path: str, at: int) -> bool:
    """Return whether the text of a stream begins with a page; the dump's end has none."""
    stream, text = bz2.BZ2Decompressor(), b""
    with open(path, "rb") as stored:
        stored.seek(at)
        try:
            while len(text) < _SEEN and not stream.eof:
                feed = stored.read(1 << 16) if stream.needs_input else b""
                if stream.needs_input and not feed:
                    return False
                text += stream.decompress(feed, _SEEN)
        except OSError:
            return False
    return text.lstrip().startswith((b"<page>", b"</mediawiki>"))


def _by_index(file: Piece, index: str, limit: int) -> list[int]:
    """Return where pieces begin, by the index; CorpusError if it does not fit the dump."""
    borders = [0]
    last = 0
    for at, line in lines(index):  # offset:page id:title
        number = (line or b"").split(b":", 1)[0]
        if not number.isdigit() or len(number) > 18:
            raise CorpusError(f"{one_line(index)}: no index of a dump (at byte {at}): {FIX}")
        offset = int(number)
        if offset < last:
            raise CorpusError(f"{one_line(index)}: {offset} comes after {last}: {FIX}")
        if offset >= file.size:
            raise CorpusError(
                f"{one_line(index)}: byte {offset} lies beyond the dump's {file.size} bytes: {FIX}"
            )
        last = offset
        if last - borders[-1] >= limit:
            borders.append(last)
    if last == 0:
        raise CorpusError(f"{one_line(index)}: names no page: {FIX}")
    with opened(file.path, seekable=True) as stored:
        for offset in [*borders[1:], last]:
            stored.seek(offset)
            if not _STREAM.match(stored.read(10)):
                raise CorpusError(
                    f"{one_line(index)}: no bz2 stream begins at byte {offset} of the dump: {FIX}"
                )
    return borders


_PAGE = b"<page>"  # in a page's text the bracket is escaped
_PAGE_LIMIT = 1 << 24  # characters; MediaWiki itself stops at 2 MiB a page
_FIELD_LIMIT = 1 << 12  # characters of a title or an id
_TOKEN_LIMIT = 1 << 20  # bytes; expat before 2.6 takes quadratic time over one long token
_HEAD_LIMIT = 1 << 20  # bytes
_FILE_NAMESPACES = ("6", "14", "-2")  # File, Category, Media under the names of the wiki's language
_FIELDS = frozenset(("base", "namespace", "title", "ns", "id", "redirect", "text", "page"))


@dataclass(frozen=True, slots=True)
class _Page:
    id: str
    title: str
    wikitext: str | None  # None: longer than the limit


@dataclass(slots=True)
class _Dump:
    """Hold the state of the parse: expat's handlers fill it."""

    site: str = ""
    not_prose: frozenset[str] = frozenset()
    pages: list[_Page] = field(default_factory=list)
    num_pages: int = 0
    fields: dict[str, str] = field(default_factory=dict)
    texts: list[str] | None = None  # text of the element being read, if it is wanted
    size: int = 0
    limit: int = 0
    namespace_key: str = ""
    root: str = ""
    in_head: bool = True
    ended: bool = False  # the whole file has been fed, not a piece of it

    def start(self, name: str, attributes: dict[str, str]) -> None:
        self.root = self.root or name
        if name == "page":
            self.fields = {}
            self.in_head = False
        elif name == "redirect":
            self.fields["redirect"] = "yes"
        elif name == "namespace":
            self.namespace_key = attributes.get("key", "")
        if name in _FIELDS:
            # A page's own <id> comes first; those of its revision and contributor follow.
            self.texts = None if name == "id" and "id" in self.fields else []
            self.size = 0
            self.limit = _PAGE_LIMIT if name == "text" else _FIELD_LIMIT

    def characters(self, data: str) -> None:
        if self.texts is not None:
            self.size += len(data)
            if self.size <= self.limit:
                self.texts.append(data)

    def end(self, name: str) -> None:
        text = None if self.texts is None else "".join(self.texts)
        self.texts = None
        # The head names the site and its namespaces; it is over when the first page begins.
        if self.in_head and name == "base" and text:
            self.site = text.strip().rsplit("/", 1)[0]
        elif self.in_head and name == "namespace" and text:
            if self.namespace_key in _FILE_NAMESPACES:
                self.not_prose |= {text.strip().lower()}
        elif name == "page":
            self.num_pages += 1
            page = self.fields
            if page.get("ns", "0").strip() == "0" and "redirect" not in page and "text" in page:
                wikitext = None if "long" in page else page["text"]
                self.pages.append(_Page(page.get("id", ""), page.get("title", ""), wikitext))
            self.fields = {}
        elif name in ("title", "ns", "id", "text") and text is not None:
            self.fields[name] = text
            if self.size > self.limit:
                self.fields["long"] = "yes"


class Mediawiki(FileSource):
    """Read a MediaWiki dump: the articles (namespace 0, no redirects) as plain text."""

    # Dumps come whole or in parts named like `...articles1.xml-p1p41242.bz2`; indexes end in
    # .txt.bz2.
    patterns: ClassVar[tuple[str, ...]] = (
        *("*.xml", "*.xml.bz2", "*.xml.gz", "*.xml.zst", "*.xml-p*[0-9]", "*.xml-p*.bz2"),
    )
    record_end: ClassVar[tuple[bytes, bytes]] = (b"</page>", b"\n</mediawiki>\n")
    cut_by_content: ClassVar[bool] = True

    kind: Literal["mediawiki"] = "mediawiki"
    licence: str = "CC-BY-SA-4.0"
    """Of the texts."""
    is_wikipedia: ClassVar[bool] = True

    def files(self) -> list[Piece]:
        """Return the dumps, without the indexes that a glob also names."""
        found = [file for file in super().files() if not INDEX.fullmatch(file.path)]
        if not found:
            raise CorpusError(f"{one_line(self.path)}: contains only index files; add the dump")
        return found

    def cut_by(self, file: Piece) -> str:
        """Return the version of the index next to a dump."""
        index = index_of(file)
        return Piece(index).version() if index else ""

    def cut(self, file: Piece, limit: int) -> list[Piece]:
        """Return a dump in ranges of bytes if plain, or of bz2 streams if there is an index.

        Raises CorpusError if the index next to it does not fit the dump.
        """
        return stream_ranges(file, limit) or byte_ranges(file, limit)

    def documents(self, piece: Piece) -> Iterator[Document | Rejected]:
        """Yield the articles that begin in a piece.

        Raises CorpusError if the dump is cut short, no XML, or declares a DTD.
        """
        dump = _Dump()
        for page in _pages(piece, dump):
            where = f"page {page.id}"
            if page.wikitext is None:
                detail = f"{page.title}: more than {_PAGE_LIMIT} characters"
                yield Rejected(where, "too long", detail)
                continue
            if not begins(page.id):
                yield Rejected(where, SKIPPED, page.title)
                continue
            result = plain_text(page.wikitext, not_prose=dump.not_prose)
            if not result.text:
                yield Rejected(where, "empty", page.title)
                continue
            url = f"{dump.site}/{quote(page.title.replace(' ', '_'), safe='/:(),!')}"
            notes = ("simple fallback",) if result.fallback else ()
            yield Document(result.text, page.id, page.title, url if dump.site else "", notes)


def _pages(piece: Piece, dump: _Dump) -> Iterator[_Page]:
    path = one_line(piece.path)
    # A range of a compressed file is one of bz2 streams.
    cut = piece.start > 0 or piece.end is not None
    streams = is_compressed(piece.path) and cut
    # (offset, bytes) of the XML of the piece's pages, behind what comes before a dump's first page.
    # Offsets are those of the decompressed file, or within a range of streams.
    if streams:
        feed = _until_page(file_chunks(piece.path, piece.start, piece.end), 0, None, dump)
    elif piece.start == 0:
        feed = _until_page(file_chunks(piece.path, about=piece.end), 0, piece.end, dump)
    else:
        first, ahead = piece.start, _Dump()  # where the first page of the piece begins
        chunks = file_chunks(piece.path, first, about=piece.end)
        for at, skipped in _until_page(chunks, first, first, ahead):
            first = at + len(skipped)
            if piece.end is not None and first >= piece.end:
                return  # it is another piece's
        if ahead.ended:
            return  # no page begins in the rest of the file
        feed = _until_page(file_chunks(piece.path, first, about=piece.end), first, piece.end, dump)
    if piece.start > 0:
        feed = chain(_head(piece.path), feed)

    def refuse(*declaration: object) -> None:
        raise CorpusError(f"{path}: declares a DOCTYPE or entities, which no MediaWiki dump does")

    parser = expat.ParserCreate()
    parser.StartElementHandler = dump.start
    parser.EndElementHandler = dump.end
    parser.CharacterDataHandler = dump.characters
    parser.StartDoctypeDeclHandler = refuse
    parser.EntityDeclHandler = refuse
    parser.buffer_text = True
    fed = at = 0
    try:
        for at, chunk in feed:
            parser.Parse(chunk, False)
            fed += len(chunk)
            if fed - parser.CurrentByteIndex > _TOKEN_LIMIT:
                raise CorpusError(f"{path}: an XML token of more than 1 MiB near byte {at}")
            # After each chunk, so that no more pages are held than one chunk completes.
            yield from dump.pages
            dump.pages.clear()
        if streams:
            dump.ended = piece.end is None
        if fed or piece.start == 0:
            # A middle piece does not end the XML document; an open page is an error.
            parser.Parse(b"" if dump.ended else f"</{dump.root}>".encode(), True)
    except expat.ExpatError as error:
        fix = FIX if streams else "download it again"
        raise CorpusError(
            f"{path}: no whole XML near byte {at} ({error}) after {dump.num_pages} pages: {fix}"
        ) from error
    except CorpusError as error:
        raise CorpusError(f"{error} (after {dump.num_pages} pages)") from error
    yield from dump.pages


def _head(path: str) -> Iterator[tuple[int, bytes]]:
    for at, chunk in _until_page(file_chunks(path, about=1), 0, 0, _Dump()):
        if at > _HEAD_LIMIT:
            raise CorpusError(
                f"{one_line(path)}: no <page> in its first MiB; is it a MediaWiki dump?"
            )
        yield at, chunk


def _until_page(
    stream: Iterator[bytes], at: int, stop: int | None, dump: _Dump
) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, bytes) of a stream that begins at `at`, up to the first page after `stop`."""
    held = b""
    for chunk in stream:
        data = held + chunk
        if stop is not None and (found := data.find(_PAGE, max(0, stop - at))) >= 0:
            yield at, data[:found]
            return
        # The last bytes may begin a <page> that the next chunk completes.
        sure = max(0, len(data) - len(_PAGE) + 1)
        yield at, data[:sure]
        at, held = at + sure, data[sure:]
    yield at, held
    dump.ended = True
