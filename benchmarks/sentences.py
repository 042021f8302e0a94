"""Write the sentences of Wikipedia articles one a line, which `kind: text, document: line` reads.

    python benchmarks/sentences.py wiki/wikiextractor_enwiki_2015/text sentences.txt --most 100000

A sentence ends before a space and a capital letter, so "J. S. Bach" is cut. Encoders are distilled
from such text without labels, where a cut in a wrong place costs nothing. Headings and pieces of
less than 20 or more than 300 characters are left out. Of more sentences than `--most`, those of the
first articles are taken.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from data_prep.sources import Document, WikiExtractor
from data_prep.text.cleaning import clean

SHORTEST, LONGEST = 20, 300  # characters
_END = re.compile(r"(?<=[.!?]) +(?=[A-Z])")


def sentences(folder: Path) -> Iterator[str]:
    """Yield the sentences of all articles in the order of the files."""
    source = WikiExtractor(kind="wikiextractor", path=str(folder))
    for piece in source.inputs(1 << 24):
        for document in source.documents(piece):
            if not isinstance(document, Document):
                continue
            for paragraph in clean(document.text).splitlines():
                for sentence in _END.split(paragraph):
                    ends = sentence.endswith((".", "!", "?"))
                    if ends and SHORTEST <= len(sentence) <= LONGEST:
                        yield sentence


def main() -> None:
    """Write a file of sentences."""
    parser = argparse.ArgumentParser(description="Write the sentences of Wikipedia articles.")
    parser.add_argument("folder", type=Path, help="as WikiExtractor wrote it")
    parser.add_argument("output", type=Path)
    parser.add_argument("--most", type=int, default=100_000)
    options = parser.parse_args()
    number = 0
    with options.output.open("w", encoding="utf-8") as file:
        for sentence in islice(sentences(options.folder), options.most):
            print(sentence, file=file)
            number += 1
    print(f"{number:,} sentences: {options.output}")


if __name__ == "__main__":
    main()
