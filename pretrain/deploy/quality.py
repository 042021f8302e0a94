"""Measure what a file's answers are worth: masked accuracy, similarities, or a task's score.

Shapes: n texts, B documents, L tokens, M masked tokens, W width of a vector, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_prep.shards import load_manifest, open_shards
from pretrain import RunError
from pretrain.contracts.batch import IGNORE
from pretrain.deploy.heads import Masked, check_fit, logits_at_masks, masked_documents
from pretrain.deploy.session import LOGITS, OnnxEncoder, Session, pad_id, vectors_of
from pretrain.encoders import FEWEST_PAIRS, scored_pairs, unit, validation_texts
from pretrain.monitor.figures import Figure, interval, resamples
from pretrain.scores import check_file_fits, logits_of_file, measured_by, metric_of
from pretrain.tasks.labelled import LabelledRows
from pretrain.tasks.task_metrics import pearson

ROWS = 2000  # documents, or pairs
_PART = 4  # what a single group costs is measured on a quarter


class Quality(ABC):
    """Measure files on the same examples as the one in fp32.

    Attributes:
        name: of the value.
        count: of the examples, in words.
        of_all, of_part: the value of the file in fp32, on all examples and on a quarter.
    """

    name: str
    count: str
    of_all: float
    of_part: float

    @abstractmethod
    def measure(self, file: Path, *, part: bool = False) -> tuple[float, float]:
        """Return the value of a file, and its agreement with fp32."""

    def drop(self, file: Path) -> Figure:
        """Return how far a file's value is below fp32; where they resolve it, with its interval.

        Examples are drawn for both at once.
        """
        size, value = self.values(file)
        drawn = [value(some) for some in resamples(size)] if size else [np.nan]
        return interval(value(np.arange(size)), drawn)

    @abstractmethod
    def values(self, file: Path) -> tuple[int, Callable[[NDArray[np.int64]], float]]:
        """Return the number of examples, and what gives the drop on some of them."""


class HeadQuality(Quality):
    """Measure how many masked tokens a file guesses; agreement: the same guesses as in fp32.

    Where fp32 guesses no better than the most frequent token, the value is that agreement.
    """

    name = "masked accuracy"

    def __init__(self, source: Path, shards: Path, pad: int) -> None:
        # Rows and documents are taken evenly: packing puts the longest first.
        size = len(open_shards(shards, "validation"))
        rows = np.arange(min(ROWS, size)) * size // max(1, min(ROWS, size))
        documents = list(masked_documents(shards, rows))
        if not documents:
            raise RunError(f"--data {shards}: its validation rows have no token to mask")
        num = min(ROWS, len(documents))
        self.documents = [documents[i * len(documents) // num] for i in range(num)]
        self.pad = pad
        self.labels = np.concatenate([d.labels for d in self.documents])
        self.in_fp32 = self._guesses(source, self.documents)
        self.of_all = float((self.in_fp32 == self.labels).mean())
        self.some = self.documents[::_PART]
        chosen = [i % _PART == 0 for i, d in enumerate(self.documents) for _ in d.places]
        self.chosen = np.array(chosen)
        self.of_part = float((self.in_fp32 == self.labels)[self.chosen].mean())
        self.count = f"{num:,} documents"
        self.guesses_well = self.of_all > np.bincount(self.labels).max() / len(self.labels)
        if not self.guesses_well:  # nothing could fall
            self.name, self.of_all, self.of_part = "agreement with fp32", 1.0, 1.0

    def measure(self, file: Path, *, part: bool = False) -> tuple[float, float]:
        """Return masked accuracy, and the share of guesses as in fp32."""
        labels, known = self.labels, self.in_fp32
        if part:
            labels, known = labels[self.chosen], known[self.chosen]
        guesses = self._guesses(file, self.some if part else self.documents)
        agreement = float((guesses == known).mean())
        return float((guesses == labels).mean()) if self.guesses_well else agreement, agreement

    def values(self, file: Path) -> tuple[int, Callable[[NDArray[np.int64]], float]]:
        """Return the number of documents, and what gives the drop on some of them."""
        known = self.labels if self.guesses_well else self.in_fp32
        ends = np.cumsum([len(d.places) for d in self.documents])[:-1]
        guesses = self._guesses(file, self.documents)
        lost = (self.in_fp32 == known).astype(int) - (guesses == known)
        each = np.array([(len(part), part.sum()) for part in np.split(lost, ends)])
        return len(each), lambda some: float(each[some, 1].sum() / max(1, each[some, 0].sum()))

    def _guesses(self, file: Path, documents: Sequence[Masked]) -> NDArray[np.int64]:
        session = Session(file)
        found = [
            logits.argmax(-1)
            for logits in logits_at_masks(
                lambda ids, mask: session(LOGITS, ids, mask), documents, self.pad
            )
        ]
        return np.concatenate(found)


class VectorQuality(Quality):
    """Measure how well cosines of vectors follow scores of pairs, or those of fp32.

    With a table of pairs the value is Pearson's correlation with its scores. With shards it is the
    correlation of the cosines of all pairs of validation documents with those in fp32. Agreement:
    the mean cosine of a vector and the one in fp32.
    """

    def __init__(self, source: Path, data: Path) -> None:
        encoder, scores = OnnxEncoder(str(source)), None
        if data.is_file():
            first, second, scores = scored_pairs(data)
            num = min(ROWS, len(scores))
            places = np.arange(num) * len(scores) // num
            texts = [first[i] for i in places] + [second[i] for i in places]
            scores, self.name = scores[places], "Pearson's correlation"
        else:
            texts = check_texts(data)
            self.name = "correlation of similarities with fp32"
        self.scores = scores
        self.count = f"{len(texts):,} documents" if scores is None else f"{len(scores):,} pairs"
        self.ids, self.pad = encoder.ids(texts), encoder.pad
        self.in_fp32 = vectors_of(encoder.session, self.ids, self.pad)
        self.of_all, _ = self._value(self.in_fp32, self._chosen(part=False))
        some = self._chosen(part=True)
        self.of_part, _ = self._value(self.in_fp32[some], some)

    def measure(self, file: Path, *, part: bool = False) -> tuple[float, float]:
        """Return the correlation, and the mean cosine with fp32."""
        chosen = self._chosen(part=part)
        vectors = vectors_of(Session(file), [self.ids[i] for i in chosen], self.pad)
        return self._value(vectors, chosen)

    def values(self, file: Path) -> tuple[int, Callable[[NDArray[np.int64]], float]]:
        """Return the number of pairs, and what gives the drop on some; without scores none."""
        both = [unit(v) for v in (self.in_fp32, vectors_of(Session(file), self.ids, self.pad))]
        if self.scores is None:
            return 0, lambda some: self.of_all - self._value(both[1], self._chosen(part=False))[0]
        num, scores = len(self.scores), self.scores
        fp32, ours = ((v[:num] * v[num:]).sum(1) for v in both)
        return (
            num,
            lambda some: pearson(fp32[some], scores[some]) - pearson(ours[some], scores[some]),
        )

    def _chosen(self, *, part: bool) -> NDArray[np.int64]:
        """Return the places of the texts; of pairs both."""
        step = _PART if part else 1
        if self.scores is None:
            return np.arange(0, len(self.ids), step)
        first = np.arange(0, len(self.scores), step)
        return np.concatenate([first, first + len(self.scores)])

    def _value(self, vectors: Any, chosen: NDArray[np.int64]) -> tuple[float, float]:
        ours, known = unit(vectors), unit(self.in_fp32[chosen])
        agreement = float((ours * known).sum(1).mean())
        if self.scores is not None:
            half = len(chosen) // 2
            return pearson(
                (ours[:half] * ours[half:]).sum(1), self.scores[chosen[:half]]
            ), agreement
        pairs = np.triu_indices(len(ours), 1)
        return pearson((ours @ ours.T)[pairs], (known @ known.T)[pairs]), agreement


class TaskQuality(Quality):
    """Measure the score of a task on its validation examples; agreement: the same answers.

    Of a model that gives scores, agreement is the correlation with those in fp32.
    """

    def __init__(self, source: Path, shards: Path) -> None:
        self.rows = LabelledRows(open_shards(shards, "validation"))
        num = len(self.rows.ids)
        self.places = np.arange(min(ROWS, num)) * num // min(ROWS, num)
        if self.rows.kind == "question_answering":  # an answer is chosen among all rows of its text
            self.places = np.arange(num)
        self.name = metric_of(self.rows.shards.manifest)
        self.count = f"{len(self.places):,} examples"
        self.in_fp32 = logits_of_file(Session(source), self.rows, self.places)
        self.of_all = self._score(self.in_fp32, self.places)
        some = self._some()
        self.of_part = self._score(self.in_fp32[some], self.places[some])

    def measure(self, file: Path, *, part: bool = False) -> tuple[float, float]:
        """Return the score, and the share of answers as in fp32."""
        some = self._some() if part else np.arange(len(self.places))
        logits = logits_of_file(Session(file), self.rows, self.places[some])
        score = self._score(logits, self.places[some])
        known = self.in_fp32[some]
        if known.ndim == 2 and known.shape[1] == 1:
            return score, pearson(logits[:, 0].astype(float), known[:, 0].astype(float))
        if self.rows.kind == "question_answering":  # the tokens of a row compete
            return score, float((logits.argmax(1) == known.argmax(1)).mean())
        same = logits.argmax(-1) == known.argmax(-1)
        if self.rows.kind == "token_classification":  # of words, and not of padding
            words = self.rows.columns["tags"][self.places[some], : same.shape[1]] != IGNORE
            same = same[words]
        return score, float(same.mean())

    def values(self, file: Path) -> tuple[int, Callable[[NDArray[np.int64]], float]]:
        """Return the number of labelled examples, and what gives the drop on some of them."""
        logits = logits_of_file(Session(file), self.rows, self.places)
        fp32, ours = (measured_by(self.rows, z, self.places) for z in (self.in_fp32, logits))
        return fp32.size, lambda some: fp32.score(self.name, some) - ours.score(self.name, some)

    def _some(self) -> NDArray[np.int64]:
        whole = self.rows.kind == "question_answering"
        return np.arange(0, len(self.places), 1 if whole else _PART)

    def _score(self, logits: Any, places: NDArray[np.int64]) -> float:
        return measured_by(self.rows, logits, places).score(self.name)


def check_texts(data: Path) -> list[str]:
    """Return the texts that a sentence encoder is measured on; RunError if they are too few."""
    texts = scored_pairs(data)[0] if data.is_file() else validation_texts(data, ROWS)
    if not data.is_file() and len(texts) < FEWEST_PAIRS:
        raise RunError(
            f"{data}: {len(texts)} of its validation documents are whole, and {FEWEST_PAIRS} are "
            "needed; give a table of pairs with --data"
        )
    return texts


def quality_of(source: Path, folder: Path, data: Path, *, has_logits: bool) -> Quality:
    """Return what measures the files of a model.

    Raises:
        RunError, CorpusError: there is nothing to measure on.
    """
    if not data.is_file() and load_manifest(data).has_labels and has_logits:
        check_file_fits(f"--data {data}", folder, load_manifest(data))
        return TaskQuality(source, data)
    if not has_logits:
        return VectorQuality(source, data)
    if data.is_file():
        raise RunError(f"--data {data}: a model with an LM head is measured on shards")
    # Token ids of another vocabulary would be other words.
    check_fit(f"--data {data}", folder, load_manifest(data))
    return HeadQuality(source, data, pad_id(folder))
