"""Measure classes and scores, fast enough for the thousand resamples of an interval.

Where a figure is not defined, for instance Pearson's correlation of a constant, it is 0: nothing
was found. Matthews' coefficient of a constant is 0 by its definition.

Shapes: R rows, C classes.

Answers are chosen and compared with people's as SQuAD's script does. Entities are counted as by the
script of CoNLL 2003: a tag is O, or a prefix and a type: B-PER begins a person and I-PER continues
it; of IOBES also S (a single word) and E (an end), of BILOU U and L. An I after another type, or
after O, begins an entity, too. A tag without a prefix, such as NOUN, is an entity of one word.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def of_classes(labels: NDArray[np.int64], chosen: NDArray[np.int64], num: int) -> dict[str, float]:
    """Return accuracy, F1 and Matthews' correlation of the labels that were chosen [R].

    A choice of -1 is none. F1 is that of the second class where there are two, else the mean over
    all classes.
    """
    size, right = float(len(labels)), labels[labels == chosen]
    chosen = np.where(chosen < 0, num, chosen)
    given_C, chosen_C, right_C = (
        np.bincount(some, minlength=num + 1).astype(np.float64) for some in (labels, chosen, right)
    )
    # 0 of a class that does not occur.
    f1_C = (2 * right_C / np.maximum(given_C + chosen_C, 1))[:num]
    return {
        "accuracy": len(right) / size,
        "f1": float(f1_C[1] if num == 2 else f1_C.mean()),
        "mcc": matthews(given_C, chosen_C, len(right)),
    }


def matthews(given_C: Floats, chosen_C: Floats, right: float) -> float:
    """Return Matthews' correlation, of more than two classes Gorodkin's (2004).

    Args:
        given_C: how often each class is right.
        chosen_C: how often each is chosen.
        right: how often the right one is chosen.
    """
    size = given_C.sum()
    spread = (size**2 - given_C @ given_C) * (size**2 - chosen_C @ chosen_C)
    return float((right * size - given_C @ chosen_C) / np.sqrt(spread)) if spread else 0.0


def of_scores(scores: Floats, given: Floats) -> dict[str, float]:
    """Return Pearson's and Spearman's correlation of scores [R] with those of people."""
    finite = np.isfinite(scores).all()  # a model that diverged has found nothing
    if not finite or len(scores) < 2 or np.ptp(scores) == 0 or np.ptp(given) == 0:
        return {"pearson": 0.0, "spearman": 0.0}
    return {"pearson": pearson(scores, given), "spearman": spearman(scores, given)}


def pearson(x: Floats, y: Floats) -> float:
    """Return the correlation coefficient of two samples [R]."""
    x, y = x - x.mean(), y - y.mean()
    return float(x @ y / np.sqrt((x @ x) * (y @ y)))


def spearman(x: Floats, y: Floats) -> float:
    """Return the correlation coefficient of the ranks [R]; equal values share their mean rank."""
    once = np.ones(len(x))
    return pearson(ranks(places(x), once), ranks(places(y), once))


def places(values: Floats) -> NDArray[np.int64]:
    """Return the place [R] of each value among the different values in order."""
    found: NDArray[np.int64] = np.unique(values, return_inverse=True)[1]
    return found


def ranks(places: NDArray[np.int64], times: Floats) -> Floats:
    """Return the mean rank [R] of values at `places`, where each occurs so many `times` [R]."""
    counts = np.bincount(places, times)
    found: Floats = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return found


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


class Entity(NamedTuple):
    """Hold the type and the words of an entity: from `begin` to `end`, exclusive."""

    kind: str
    begin: int
    end: int


def entities(tags: Sequence[str]) -> list[Entity]:
    """Return the entities of a sentence's tags."""
    found: list[Entity] = []
    begin, kind, before = 0, "", "O"
    for place, tag in enumerate([*tags, "O"]):
        prefix, _, name = tag.partition("-") if "-" in tag else ("S", "", tag)
        prefix = "O" if tag == "O" else {"U": "S", "L": "E"}.get(prefix, prefix)
        # Does an entity end before this word?
        if kind and (prefix in "OBS" or before in "ES" or name != kind):
            found.append(Entity(kind, begin, place))
            kind = ""
        if prefix != "O" and not kind:
            begin, kind = place, name
        before = prefix
    return found


def counts(given: Sequence[str], guessed: Sequence[str]) -> tuple[int, int, int]:
    """Return the numbers of right, guessed and given entities of a sentence."""
    theirs, ours = set(entities(given)), set(entities(guessed))
    return len(theirs & ours), len(ours), len(theirs)
