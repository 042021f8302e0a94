"""Choose answers from logits, and compare them with those of people as SQuAD's script does."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

LONGEST = 30  # tokens of an answer
_BEST = 20  # so many starts and ends are paired


def best_span(start: Any, end: Any, inside: Any) -> tuple[float, int, int]:
    """Return (score, first, last) of the best answer of a row.

    Args:
        start, end: logits [L].
        inside: which tokens are of the text that is searched [L].
    """
    hidden_start, hidden_end = (np.where(inside, z, -np.inf) for z in (start, end))
    starts, ends = (np.argsort(-z, kind="stable")[:_BEST] for z in (hidden_start, hidden_end))
    scores = hidden_start[starts][:, None] + hidden_end[ends][None, :]
    length = ends[None, :] - starts[:, None]
    scores = np.where((length >= 0) & (length < LONGEST), scores, -np.inf)
    i, j = np.unravel_index(int(scores.argmax()), scores.shape)
    return float(scores[i, j]), int(starts[i]), int(ends[j])


def normal(text: str) -> str:
    """Return an answer as the script compares it: without case, marks, articles and spaces."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(guess: str, answers: Sequence[str]) -> float:
    """Return 1 if a guess is one of the answers, else 0; "" where there is none."""
    return float(normal(guess) in {normal(answer) for answer in answers or [""]})


def f1(guess: str, answers: Sequence[str]) -> float:
    """Return the highest F1 of a guess's words with those of an answer."""
    return max(_f1(normal(guess).split(), normal(answer).split()) for answer in answers or [""])


def _f1(ours: list[str], theirs: list[str]) -> float:
    if not ours or not theirs:
        return float(ours == theirs)
    common = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * common / (len(ours) + len(theirs))
