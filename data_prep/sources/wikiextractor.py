"""The output of WikiExtractor: files of <doc ...> blocks, or of JSON lines."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from typing import Literal

from data_prep import CorpusError
from data_prep.sources.document import Document, FileSource, Rejected
from data_prep.sources.files import lines, list_files, relative_name
from data_prep.wikipedia import without_holes

_OPEN = re.compile(r'<doc id="([^"]*)"(?: revid="[^"]*")?(?: url="([^"]*)")?(?: title="(.*)")?>')
_BODY_LIMIT = 1 << 24  # characters

# Left over by the extractor: tags, braces of templates it could not close, bare entities.
_TAG = re.compile(
    r"</?[a-zA-Z][\w:-]{0,20}(?:\s[^<>\n]{0,300})?/?>|<(?:span|div|ref)\b[^<>\n]*(?m:$)"
)
_BRACES = re.compile(r"\{\{[^{}\n]{0,500}\}\}|\{\{+|\}\}+|\[\[|\]\]|\{\||\|\}|__[A-Z]{3,}__")
_TABLE_LINE = re.compile(r"(?m)^[ \t]*[|!].*\n?")


class WikiExtractor(FileSource):
    """Folders or files that WikiExtractor wrote, plain or compressed, with or without --json."""

    kind: Literal["wikiextractor"] = "wikiextractor"
    licence: str = "CC-BY-SA-4.0"


def inputs(source: WikiExtractor) -> list[str]:
    """The extractor's files (AA/wiki_00 ...); CorpusError if there are none."""
    return list_files(source.path, ("wiki_*", "*.json", "*.jsonl", "*.txt", "*.gz", "*.bz2"))


def read(source: WikiExtractor, input: str) -> Iterator[Document | Rejected]:
    """The articles of one file; CorpusError if its last article has no end."""
    name = relative_name(source.path, input)
    head: re.Match[str] | None = None
    start, size = 0, 0
    body: list[bytes] = []
    for number, line in lines(input):
        where = f"{name}#{number}"
        if line is None:
            yield Rejected(where, "too long", "a line of more than 64 MiB")
        elif head is None and line.startswith(b"{"):
            yield _from_json(line, where)
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
                yield _article(head, b"\n".join(body), where)
            head = None
        elif head is not None:
            size += len(line)
            if size <= _BODY_LIMIT:
                body.append(line)
    if head is not None:
        raise CorpusError(f"{input}: cut short in the article of line {start}; extract it again")


def _article(head: re.Match[str], body: bytes, where: str) -> Document | Rejected:
    title = html.unescape(head[3] or "")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        return Rejected(where, "not utf-8", f"{error.reason} at byte {error.start} of the article")
    return _document(text, head[1], title, html.unescape(head[2] or ""), where)


def _from_json(line: bytes, where: str) -> Document | Rejected:
    try:
        article = json.loads(line)
        text, id = article["text"], article["id"]
    except (ValueError, KeyError, RecursionError) as error:
        return Rejected(where, "malformed json", repr(error)[:100])
    if not isinstance(text, str):
        return Rejected(where, "malformed json", "text is no string")
    title, url = str(article.get("title", "")), str(article.get("url", ""))
    return _document(text, str(id), title, url, where)


def _document(text: str, id: str, title: str, url: str, where: str) -> Document | Rejected:
    first, _, rest = text.lstrip("\n").partition("\n")
    if first.strip() == title.strip():
        text = rest
    text = html.unescape(_TAG.sub("", html.unescape(text)))
    text = without_holes(_TABLE_LINE.sub("", _BRACES.sub("", text))).strip("\n")
    return Document(text, id, title, url) if text.strip() else Rejected(where, "empty", title)
