"""MediaWiki XML dumps, streamed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import quote
from xml.parsers import expat

from data_prep import CorpusError
from data_prep.sources.document import Document, FileSource, Rejected
from data_prep.sources.files import chunks, list_files
from data_prep.wikipedia import plain_text

# Dumps come whole or in parts named like `...articles1.xml-p1p41242.bz2`; indexes end in .txt.bz2.
PATTERNS = ("*.xml", "*.xml.bz2", "*.xml.gz", "*.xml.zst", "*.xml-p*[0-9]", "*.xml-p*.bz2")
_PAGE_LIMIT = 1 << 24  # characters; MediaWiki itself stops at 2 MiB a page
_TOKEN_LIMIT = 1 << 20  # bytes; expat before 2.6 takes quadratic time over one long token
_FILE_NAMESPACES = ("6", "14", "-2")  # File, Category, Media under the names of the wiki's language
_FIELDS = frozenset(("base", "namespace", "title", "ns", "id", "redirect", "text", "page"))


class Mediawiki(FileSource):
    """A MediaWiki dump: the articles (namespace 0, no redirects) as plain text."""

    kind: Literal["mediawiki"] = "mediawiki"
    licence: str = "CC-BY-SA-4.0"


@dataclass(frozen=True, slots=True)
class _Page:
    id: str
    title: str
    wikitext: str | None  # None: longer than the limit


@dataclass(slots=True)
class _Dump:
    """State of the parse: what expat's handlers collect."""

    site: str = ""
    not_prose: set[str] = field(default_factory=set)
    pages: list[_Page] = field(default_factory=list)
    num_pages: int = 0
    fields: dict[str, str] = field(default_factory=dict)
    pieces: list[str] | None = None  # text of the element being read, if it is of interest
    size: int = 0
    namespace_key: str = ""

    def start(self, name: str, attributes: dict[str, str]) -> None:
        if name == "page":
            self.fields = {}
        elif name == "redirect":
            self.fields["redirect"] = attributes.get("title", "yes")
        elif name == "namespace":
            self.namespace_key = attributes.get("key", "")
        if name in _FIELDS:
            # A page's own <id> comes first; those of its revision and contributor follow.
            self.pieces = None if name == "id" and "id" in self.fields else []
            self.size = 0

    def characters(self, data: str) -> None:
        if self.pieces is not None:
            self.size += len(data)
            if self.size <= _PAGE_LIMIT:
                self.pieces.append(data)

    def end(self, name: str) -> None:
        text = None if self.pieces is None else "".join(self.pieces)
        self.pieces = None
        if name == "base" and text:
            self.site = text.strip().rsplit("/", 1)[0]
        elif name == "namespace" and text and self.namespace_key in _FILE_NAMESPACES:
            self.not_prose.add(text.strip().lower())
        elif name == "page":
            self.num_pages += 1
            page = self.fields
            if page.get("ns", "0").strip() == "0" and "redirect" not in page and "text" in page:
                wikitext = None if "long" in page else page["text"]
                self.pages.append(_Page(page.get("id", ""), page.get("title", ""), wikitext))
            self.fields = {}
        elif name in ("title", "ns", "id", "text") and text is not None:
            self.fields[name] = text
            if self.size > _PAGE_LIMIT:
                self.fields["long"] = "yes"


def inputs(source: Mediawiki) -> list[str]:
    """The dump's files; CorpusError if there are none."""
    return list_files(source.path, PATTERNS)


def read(source: Mediawiki, input: str) -> Iterator[Document | Rejected]:
    """The articles of one dump file; CorpusError if it is cut short, no XML, or declares a DTD."""
    dump = _Dump()
    for page in _pages(input, dump):
        where = f"page {page.id}"
        if page.wikitext is None:
            yield Rejected(where, "too long", f"{page.title}: more than {_PAGE_LIMIT} characters")
            continue
        text = plain_text(page.wikitext, not_prose=frozenset(dump.not_prose))
        if not text:
            yield Rejected(where, "empty", page.title)
            continue
        url = f"{dump.site}/{quote(page.title.replace(' ', '_'), safe='/:(),!')}"
        yield Document(text, page.id, page.title, url if dump.site else "")


def _pages(input: str, dump: _Dump) -> Iterator[_Page]:
    def refuse(*declaration: object) -> None:
        raise CorpusError(f"{input}: declares a DOCTYPE or entities, which no MediaWiki dump does")

    parser = expat.ParserCreate()
    parser.StartElementHandler = dump.start
    parser.EndElementHandler = dump.end
    parser.CharacterDataHandler = dump.characters
    parser.StartDoctypeDeclHandler = refuse
    parser.EntityDeclHandler = refuse
    parser.buffer_text = True
    fed = 0
    try:
        for chunk in chunks(input):
            parser.Parse(chunk, False)
            fed += len(chunk)
            if fed - parser.CurrentByteIndex > _TOKEN_LIMIT:
                raise CorpusError(f"{input}: an XML token of more than 1 MiB near byte {fed}")
            yield from dump.pages
            dump.pages.clear()
        parser.Parse(b"", True)
    except expat.ExpatError as error:
        raise CorpusError(
            f"{input}: no whole XML ({error}) after {dump.num_pages} pages; download it again"
        ) from error
    except CorpusError as error:
        raise CorpusError(f"{error} (after {dump.num_pages} pages)") from error
    yield from dump.pages
