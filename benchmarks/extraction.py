"""How fast wikitext becomes prose, and how clean: MB of wikitext per second on one core.

    python benchmarks/extraction.py enwiki-pages-articles.xml.bz2 --pages 200

Three ways, in turns on the same pages: mwparserfromhell's own `strip_code`, every page through
mwparserfromhell with this project's rendering, and `data_prep.text.wikipedia.plain_text`.
"""

from __future__ import annotations

import argparse
import bz2
from collections import Counter
from collections.abc import Callable, Iterator
from time import process_time
from xml.etree import ElementTree

import mwparserfromhell

from data_prep.text.cleaning import clean
from data_prep.text.wikipedia import plain_text
from data_prep.text.wikipedia.articles import prose
from data_prep.text.wikipedia.leftovers import count
from data_prep.text.wikipedia.wikitext import is_ordinary, parsed

NOT_PROSE = frozenset(("file", "image", "category", "media"))


def articles(path: str) -> Iterator[str]:
    """The wikitext of the dump's articles, redirects left out."""
    with bz2.open(path) if path.endswith(".bz2") else open(path, "rb") as file:
        for _, page in ElementTree.iterparse(file):
            if page.tag.endswith("}page"):
                text = page.findtext("{*}revision/{*}text") or ""
                article = page.findtext("{*}ns") == "0" and page.find("{*}redirect") is None
                page.clear()
                if article and text:
                    yield text


def strip_code(wikitext: str) -> str:
    """The library's own plain text."""
    return str(mwparserfromhell.parse(wikitext).strip_code())


def parser(wikitext: str) -> str:
    """Every page by the parser (within the limits that keep it from hanging)."""
    return prose(parsed(wikitext, NOT_PROSE)) if is_ordinary(wikitext) else ""


def ours(wikitext: str) -> str:
    """What `distil prepare` does."""
    return plain_text(wikitext).text


WAYS: tuple[Callable[[str], str], ...] = (strip_code, parser, ours)


def main() -> None:
    """Prints one line a way."""
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("dump", help="a MediaWiki dump, .xml or .xml.bz2")
    options.add_argument("--pages", type=int, default=200, help="articles to read (200)")
    options.add_argument("--repeats", type=int, default=3, help="the best of so many counts (3)")
    given = options.parse_args()
    pages = [page for page, _ in zip(articles(given.dump), range(given.pages), strict=False)]
    size = sum(len(page.encode()) for page in pages) / 1e6
    print(f"{len(pages)} articles, {size:.2f} MB of wikitext")

    seconds: dict[str, list[float]] = {way.__name__: [] for way in WAYS}
    left: dict[str, Counter[str]] = {}
    for repeat in range(given.repeats):
        # Page by page in turns: whatever else the machine does slows each way alike.
        spent = dict.fromkeys(seconds, 0.0)
        texts: dict[str, list[str]] = {name: [] for name in seconds}
        for page in pages:
            for way in WAYS:
                start = process_time()
                text = way(page)
                spent[way.__name__] += process_time() - start
                texts[way.__name__].append(text)
        for name, time in spent.items():
            seconds[name].append(time)
        if not repeat:
            left = {name: count(clean("\n".join(found))) for name, found in texts.items()}
    slow = min(seconds["parser"])
    for name, times in seconds.items():
        speeds = " ".join(f"{size / time:.2f}" for time in times)
        print(
            f"{name:10} {size / min(times):6.2f} MB/s (runs: {speeds}), "
            f"{slow / min(times):5.2f} x parser, {sum(left[name].values())} leftovers "
            f"{dict(left[name].most_common(4))}"
        )


if __name__ == "__main__":
    main()
