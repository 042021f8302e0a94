"""Measure what a file's answers are worth: masked accuracy, similarities, or a task's score.

Shapes: n texts, B documents, L tokens, M masked tokens, W width of a vector, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_prep.shards import load_manifest, open_shards
from pretrain import RunError
from pretrain.contracts.batch import IGNORE
from pretrain.deploy.heads import check_fit, logits_at_masks, masked_documents
from pretrain.deploy.session import LOGITS, OnnxEncoder, Session, pad_id, vectors_of
from pretrain.encoders import FEWEST_PAIRS, scored_pairs, unit, validation_texts
from pretrain.monitor.figures import Figure, interval, resamples
from pretrain.scores import check_file_fits, logits_of_file, measured_by, metric_of
from pretrain.tasks.labelled import LabelledRows
from pretrain.tasks.task_metrics import pearson

ROWS = 2000  # documents, or pairs


class Measured(NamedTuple):
    """Hold what a file's answers are worth."""

    value: float
    agreement: float  # with fp32
    drop: Figure  # below fp32; with its interval where examples can be drawn


class Quality(ABC):
    """Measure files on the same examples as the one in fp32.

    Attributes:
        name: of the value.
        count: of the examples, in words.
        size: the number of examples that are drawn for an interval; 0 if a value has none.
        in_fp32: the answers of the file in fp32.
    """

    name: str
    count: str
    size: int
    in_fp32: Any

    @property
    def of_all(self) -> float:
        """Return the value of the file in fp32."""
        return self.value(self.examples(self.in_fp32), np.arange(self.size))

    def measure(self, file: Path) -> Measured:
        """Return what a file is worth; examples are drawn for both files at once."""
        answers = self.answers(file)
        fp32, ours = self.examples(self.in_fp32), self.examples(answers)
        every = np.arange(self.size)
        value = self.value(ours, every)
        drops = [self.value(fp32, s) - self.value(ours, s) for s in self._samples()]
        drop = interval(self.value(fp32, every) - value, drops or [np.nan])
        return Measured(value, self.agreement(answers), drop)

    def _samples(self) -> Iterable[NDArray[np.int64]]:
        return resamples(self.size) if self.size else ()

    @abstractmethod
    def answers(self, file: Path) -> Any:
        """Return what a file says of all examples."""

    @abstractmethod
    def examples(self, answers: Any) -> Any:
        """Return what a value is computed of."""

    @abstractmethod
    def value(self, examples: Any, some: NDArray[np.int64]) -> float:
        """Return the value of some examples."""

    @abstractmethod
    def agreement(self, answers: Any) -> float:
        """Return how far answers are those in fp32."""


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
        self.size = num = min(ROWS, len(documents))
        self.documents = [documents[i * len(documents) // num] for i in range(num)]
        self.masks = np.array([len(d.places) for d in self.documents])
        self.pad, self.count = pad, f"{num:,} documents"
        self.labels = np.concatenate([d.labels for d in self.documents])
        self.in_fp32 = self.answers(source)
        if self.of_all <= np.bincount(self.labels).max() / len(self.labels):  # nothing could fall
            self.name, self.labels = "agreement with fp32", self.in_fp32

    def answers(self, file: Path) -> NDArray[np.int64]:
        """Return the guesses at all masked places."""
        session = Session(file)
        found = logits_at_masks(
            lambda ids, mask: session(LOGITS, ids, mask), self.documents, self.pad
        )
        return np.concatenate([logits.argmax(-1) for logits in found])

    def examples(self, answers: Any) -> Any:
        """Return how many guesses of each document are right."""
        return np.add.reduceat(
            answers == self.labels, np.cumsum(self.masks) - self.masks, dtype=int
        )

    def value(self, examples: Any, some: NDArray[np.int64]) -> float:
        """Return the share of right guesses."""
        return float(examples[some].sum() / max(1, self.masks[some].sum()))

    def agreement(self, answers: Any) -> float:
        """Return the share of guesses as in fp32."""
        return float((answers == self.in_fp32).mean())


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
            self.size, self.count = num, f"{num:,} pairs"
        else:
            texts = check_texts(data)
            self.name = "correlation of similarities with fp32"
            self.size, self.count = 0, f"{len(texts):,} documents"
        self.ids, self.pad = encoder.ids(texts), encoder.pad
        self.in_fp32 = vectors_of(encoder.session, self.ids, self.pad)
        self.scores = scores
        if scores is None:
            self.known = self.examples(self.in_fp32)

    def answers(self, file: Path) -> Any:
        """Return the vectors of all texts."""
        return vectors_of(Session(file), self.ids, self.pad)

    def examples(self, answers: Any) -> Any:
        """Return the cosines of the pairs."""
        ours = unit(answers)
        if self.size:
            return (ours[: self.size] * ours[self.size :]).sum(1)
        return (ours @ ours.T)[np.triu_indices(len(ours), 1)]

    def value(self, examples: Any, some: NDArray[np.int64]) -> float:
        """Return the correlation."""
        if self.scores is None:
            return pearson(examples, self.known)
        return pearson(examples[some], self.scores[some])

    def agreement(self, answers: Any) -> float:
        """Return the mean cosine with fp32."""
        return float((unit(answers) * unit(self.in_fp32)).sum(1).mean())


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
        self.in_fp32 = self.answers(source)
        self.size = self.examples(self.in_fp32).size

    def answers(self, file: Path) -> Any:
        """Return the logits of all rows."""
        return logits_of_file(Session(file), self.rows, self.places)

    def examples(self, answers: Any) -> Any:
        """Return what the logits say."""
        return measured_by(self.rows, answers, self.places)

    def value(self, examples: Any, some: NDArray[np.int64]) -> float:
        """Return the score."""
        return float(examples.score(self.name, some))

    def agreement(self, answers: Any) -> float:
        """Return the share of answers as in fp32."""
        known = self.in_fp32
        if known.ndim == 2 and known.shape[1] == 1:
            return pearson(answers[:, 0].astype(float), known[:, 0].astype(float))
        if self.rows.kind == "question_answering":  # the tokens of a row compete
            return float((answers.argmax(1) == known.argmax(1)).mean())
        same = answers.argmax(-1) == known.argmax(-1)
        if self.rows.kind == "token_classification":  # only words count, not padding
            same = same[self.rows.columns["tags"][self.places, : same.shape[1]] != IGNORE]
        return float(same.mean())


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
    # Token ids of a different vocabulary would be other words.
    check_fit(f"--data {data}", folder, load_manifest(data))
    return HeadQuality(source, data, pad_id(folder))
