"""Read the values of a record: labels, scores and answers; CorpusError names what is wrong.

`where` begins each message: the file, and the number of the example.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from data_prep import CorpusError
from data_prep.messages import one_line

_MISSING = ("none", "nan", "na", "n/a", "null", "<na>")
_NUMBER = r"\s*[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?\s*"
_UNSEEN = re.compile("[\u00ad\u200b-\u200f\u2060\ufeff]")  # soft hyphens, joiners, marks
_LONGEST_NUMBER = 300  # characters
_LARGEST_SCORE = float(np.finfo(np.float32).max)


def is_missing(value: Any) -> bool:
    """Return whether a cell or a value of JSON is empty; pandas writes NaN for null."""
    return value is None or value != value or str(value).strip() == ""


def is_secret(value: Any) -> bool:
    """Return whether a label is the Hub's -1, which stands for none."""
    return str(value).strip() in ("-1", "-1.0")


def check_characters(where: str, column: Any, text: str) -> None:
    """Refuse half a character, which JSON can hold and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CorpusError(
            f"{where}: {column!r} has half a character, {text[error.start]!a}, at {error.start}: "
            "remove it"
        ) from None


def as_number(where: str, column: Any, value: Any) -> float:
    """Return a finite number that fp32 holds."""
    try:
        # Python also reads 1_000, true and digits of other scripts.
        plain = not isinstance(value, bool) and re.fullmatch(_NUMBER, str(value), re.ASCII)
        number = float(value) if plain else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise CorpusError(f"{where}: {column!r} is {one_line(str(value), 40)!r}, not a number")
    if abs(number) > _LARGEST_SCORE:
        raise CorpusError(f"{where}: {column!r} is {number:g}, which fp32 cannot hold: scale it")
    return number


def class_name(where: str, column: Any, value: Any) -> str:
    """Return a label as text, without the space around it."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise CorpusError(
            f"{where}: {column!r} is {one_line(str(value), 40)!r}, not a label: a text or a number"
        )
    check_characters(where, column, str(value))
    return str(value).strip()


def folded(text: str) -> str:
    """Return what is equal of texts that differ only in case, white space or forms of Unicode."""
    text = unicodedata.normalize("NFKC", _UNSEEN.sub("", text))
    return " ".join(text.casefold().split())


def odd_labels(labels: Iterable[str]) -> Iterator[str]:
    """Yield what is odd about a set of labels: some that are alike, or names of missing values."""
    alike: dict[Any, list[str]] = {}
    for label in sorted(labels):
        key: Any = folded(label)
        if len(label) < _LONGEST_NUMBER and re.fullmatch(_NUMBER, key, re.ASCII):
            key = float(key)
        alike.setdefault(key, []).append(one_line(label, 40))
    for names in alike.values():
        if len(names) > 1:
            yield f"the labels {' and '.join(map(repr, names))} are different classes"
    if missing := sorted(label for label in labels if label.casefold() in _MISSING):
        yield f"{', '.join(map(repr, missing))} is read as a class, and not as a missing label"


def as_answers(where: str, value: Any, context: str) -> list[tuple[int, str]]:
    """Return (begin, text) of each answer, of SQuAD's JSON or the Hub's layout."""
    pairs: list[tuple[Any, Any]] | None = None
    if isinstance(value, dict):
        begins, texts = value.get("answer_start"), value.get("text")
        if isinstance(begins, list) and isinstance(texts, list) and len(begins) == len(texts):
            pairs = list(zip(begins, texts, strict=True))
    elif isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        pairs = [(entry.get("answer_start"), entry.get("text")) for entry in value]
    if pairs is None:
        raise CorpusError(
            f"{where}: its answers are not those of SQuAD: text and answer_start, as many of each"
        )
    for begin, text in pairs:
        if isinstance(begin, bool) or not isinstance(begin, int) or not isinstance(text, str):
            raise CorpusError(f"{where}: an answer without text or answer_start")
        if not text:
            raise CorpusError(f"{where}: an answer is empty: leave it out of the list")
        if begin < 0 or context[begin : begin + len(text)] != text:
            raise CorpusError(
                f"{where}: the answer {one_line(text, 40)!r} is not in its text at character "
                f"{begin}: correct answer_start"
            )
    # No token covers the space around an answer.
    return [(begin + len(text) - len(text.lstrip()), text.strip()) for begin, text in pairs]
