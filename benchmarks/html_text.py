"""Write the prose of HTML pages in one language as JSON lines, which `kind: jsonl` reads.

    apt-get download debian-reference-de debian-handbook libreoffice-help-de
    for package in *.deb; do dpkg -x $package debian; done
    python benchmarks/html_text.py debian german.jsonl --language de

A page is a document, and each of its blocks (a paragraph, an item, a heading) is a line. Blocks of
fewer than four words are left out: they are menus, buttons and cells of tables.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

from data_prep.text.language import identify

LEAST_WORDS = 4
_SKIPPED = """
aside button footer head header math nav noscript pre script style svg
"""
_INLINE = """
a abbr acronym b bdi bdo big cite code dfn em font i kbd mark q s samp small span strong sub sup tt
u var wbr
"""
SKIPPED, INLINE = frozenset(_SKIPPED.split()), frozenset(_INLINE.split())


class Prose(HTMLParser):
    """Collect a page's blocks of text; every tag that is not inline ends a block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[str] = []
        self.title = ""
        self._parts: list[str] = []
        self._skipped: list[str] = []  # tags that are open now, and whose content is no prose
        self._in_title = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """End the block before a tag, or begin to skip."""
        self._in_title = tag == "title"
        if tag == "body":
            self._skipped.clear()  # </head> may be left out
        elif tag in SKIPPED:
            self._skipped.append(tag)
        if tag not in INLINE:
            self.end_block()

    def handle_endtag(self, tag: str) -> None:
        """End the block after a tag, or end to skip."""
        self._in_title = False
        if tag in self._skipped:
            del self._skipped[self._skipped.index(tag) :]
        if tag not in INLINE:
            self.end_block()

    def handle_data(self, data: str) -> None:
        """Add a piece of text."""
        if self._in_title:
            self.title = " ".join((self.title + data).split())
        elif not self._skipped:
            self._parts.append(data)

    def end_block(self) -> None:
        """Keep the block if it is long enough to be prose."""
        # A soft hyphen and a zero-width space only say where a line may break.
        text = "".join(self._parts).replace("\u00ad", "").replace("\u200b", "")
        self._parts.clear()
        words = text.split()
        if sum(any(map(str.isalpha, word)) for word in words) >= LEAST_WORDS:
            self.blocks.append(" ".join(words))


def pages(folder: Path, language: str) -> Iterator[dict[str, str]]:
    """Yield the pages of a folder, in the order of their paths, whose text is in a language."""
    for path in sorted(folder.rglob("*.htm*")):
        # A link would be the same page again.
        if path.is_symlink() or not path.is_file():
            continue
        prose = Prose()
        prose.feed(path.read_text(encoding="utf-8", errors="replace"))
        prose.close()
        prose.end_block()
        text = "\n".join(prose.blocks)
        if text and identify(text) == language:
            name = path.relative_to(folder).as_posix()
            yield {"id": name, "title": prose.title, "text": text}


def main() -> None:
    """Write the pages of a folder to a file."""
    parser = argparse.ArgumentParser(description="Write the prose of HTML pages as JSON lines.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--language", default="de", help="ISO 639-1 (de)")
    options = parser.parse_args()
    documents = characters = 0
    with options.output.open("w", encoding="utf-8") as file:
        for page in pages(options.folder, options.language):
            file.write(json.dumps(page, ensure_ascii=False) + "\n")
            documents, characters = documents + 1, characters + len(page["text"])
    print(f"{documents:,} pages, {characters:,} characters: {options.output}")


if __name__ == "__main__":
    main()
