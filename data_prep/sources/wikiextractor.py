"""Read the output of WikiExtractor: files of <doc ...> blocks, or of JSON lines."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from typing import ClassVar, Literal

from data_prep import CorpusError
from data_prep.messages import one_line
from data_prep.sources.document import SKIPPED, Document, Rejected, begins
from data_prep.sources.files import LONG_LINE, Piece, lines
from data_prep.sources.kind import FileSource
from data_prep.sources.text import cut
from data_prep.text.wikipedia import repaired

_OPEN = re.compile(r'<doc id="([^"]*)"(?: revid="[^"]*")?(?: url="([^"]*)")?(?: title="(.*)")?>')
_BODY_LIMIT = 1 << 24  # characters


class WikiExtractor(FileSource):
    """Read folders or files that WikiExtractor wrote, plain or compressed, with or without --json.

    A file (AA/wiki_00 ...) is one piece, whatever the limit: the extractor makes them of 1 MB.
    """

    patterns: ClassVar[tuple[str, ...]] = (
        *("wiki_*", "*.json", "*.jsonl", "*.txt", "*.gz", "*.bz2"),
    )
    record_end: ClassVar[tuple[bytes, bytes]] = (b"</doc>", b"\n")

    kind: Literal["wikiextractor"] = "wikiextractor"
    document: Literal["article", "sentence"] = "article"
    """What is a document."""
    licence: str = "CC-BY-SA-4.0"
    """Of the texts."""
    is_wikipedia: ClassVar[bool] = True

    def documents(self, piece: Piece) -> Iterator[Document | Rejected]:
        """Yield the articles of one file; CorpusError if its last article has no end."""
        for article in self._articles(piece):
            yield from [article] if self.document == "article" else cut(article)

    def _articles(self, piece: Piece) -> Iterator[Document | Rejected]:
        name = self.input_name(piece)
        head: re.Match[str] | None = None
        start, size = 0, 0
        body: list[bytes] = []
        for number, (_, line) in enumerate(lines(piece.path), start=1):
            where = f"{name}#{number}"
            if line is None:
                yield Rejected(where, "too long", LONG_LINE)
            elif head is None and line.startswith(b"{"):
                try:
                    article = json.loads(line)
                    text, id = article["text"], article["id"]
                except (ValueError, KeyError, RecursionError) as error:
                    yield Rejected(where, "malformed json", repr(error)[:100])
                    continue
                if not isinstance(text, str):
                    yield Rejected(where, "malformed json", "text is no string")
                    continue
                title, url = str(article.get("title", "")), str(article.get("url", ""))
                yield _document(text, str(id), title, url, where)
            elif head is None and line.startswith(b"<doc "):
                head = _OPEN.fullmatch(line.decode("utf-8", "replace").strip())
                start, size, body = number, 0, []
                if head is None:
                    yield Rejected(where, "malformed doc", "a <doc> line without id, url and title")
            elif head is not None and line.strip() == b"</doc>":
                where = f"{name}#{start}"
                if size > _BODY_LIMIT:
                    yield Rejected(where, "too long", f"more than {_BODY_LIMIT} bytes")
                else:
                    try:
                        text = b"\n".join(body).decode("utf-8")
                    except UnicodeDecodeError as error:
                        detail = f"{error.reason} at byte {error.start} of the article"
                        yield Rejected(where, "not utf-8", detail)
                    else:
                        title, url = html.unescape(head[3] or ""), html.unescape(head[2] or "")
                        yield _document(text, head[1], title, url, where)
                head = None
            elif head is not None:
                size += len(line)
                if size <= _BODY_LIMIT:
                    body.append(line)
        if head is not None:
            raise CorpusError(
                f"{one_line(piece.path)}: cut short in the article of line {start}; extract it "
                "again"
            )


def _document(text: str, id: str, title: str, url: str, where: str) -> Document | Rejected:
    first, _, rest = text.lstrip("\n").partition("\n")
    if first.strip() == title.strip():
        text = rest
    if not begins(id):
        return Rejected(where, SKIPPED, title)
    text = repaired(text)
    return Document(text, id, title, url) if text else Rejected(where, "empty", title)
