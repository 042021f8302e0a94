"""Cut text into sentences, for corpora whose documents are sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator

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
