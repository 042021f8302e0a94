"""Define the file of a task's data that `distil prepare` reads; it has a section `task:`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from data_prep.config import JsonTokenizer, RowLength, VocabularyTokenizer
from data_prep.keys import Keys

Split = Literal["train", "validation", "test"]
Kind = Literal[
    "classification", "regression", "token_classification", "question_answering", "similarity"
]
_METRICS: dict[str, tuple[str, ...]] = {
    "classification": ("accuracy", "mcc", "f1", "f1 and accuracy"),
    "regression": ("pearson", "spearman", "pearson and spearman"),
    "similarity": ("pearson", "spearman", "pearson and spearman"),
    "token_classification": ("entity f1", "accuracy"),
    "question_answering": ("f1", "exact match"),
}
Column = Annotated[str, Field(min_length=1)] | Annotated[int, Field(ge=0)]


class Columns(Keys):
    """Say what an example is, and where a file has its parts.

    A column is a name, or its place from 0 in a CSV or TSV without a line of names. `labels` gives
    the classes in the order of their numbers; without it they are sorted. A number in the data is
    the place of a label, unless the labels are numbers themselves. `probabilities` holds a list of
    numbers for each example, as a large model gives them, or names a column for each label.
    `metric` is the score of a model; left out it is the usual one of the task.
    """

    name: Kind
    text: Column | None = None  # by default `text`; of question answering `question`
    pair: Column | None = None  # a second text; of question answering by default `context`
    label: Column | None = None  # by default `label`; of tagging `tags`, of answers `answers`
    probabilities: Column | tuple[Column, ...] | None = None
    id: Column | None = None  # by default the number of the example in its file
    labels: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    metric: str | None = None

    @model_validator(mode="after")
    def _fits(self) -> Columns:
        if self.metric not in (None, *_METRICS[self.name]):
            raise ValueError(f"metric: of {self.name} take {', '.join(_METRICS[self.name])}")
        if self.name == "similarity" and self.pair is None:
            raise ValueError("similarity compares two texts: name the column of the second in pair")
        if self.name not in ("classification", "token_classification") and self.labels:
            raise ValueError(f"{self.name} has no classes: remove labels")
        if any(label != label.strip() for label in self.labels):
            raise ValueError("labels: remove the space around a label")
        if len(set(self.labels)) < len(self.labels) or len(self.labels) == 1:
            raise ValueError("labels: give two or more, each once")
        if self.probabilities is not None and self.name != "classification":
            raise ValueError("probabilities are for task classification: remove the key")
        if self.probabilities is not None and not self.labels:
            raise ValueError("probabilities: name the classes in their order in labels")
        if isinstance(self.probabilities, tuple) and len(self.probabilities) != len(self.labels):
            raise ValueError("probabilities: name one column for each of `labels`, in their order")
        if self.name == "token_classification" and self.pair is not None:
            raise ValueError("token_classification reads one text: remove pair")
        return self


class ExamplesConfig(Keys):
    """Hold the data of a task: its files, its columns and the tokenizer of the model.

    `validation` may be a share of the training examples instead of a file. An example that is
    longer than `max_length` tokens is refused, or cut with `longer: cut`; a context of question
    answering becomes several rows that share `stride` tokens. `unlabelled` takes a file as the
    others are, or a folder of shards that keeps its texts; what is longer is left out.
    """

    output: Path
    task: Columns
    train: Path
    validation: Path | Annotated[float, Field(gt=0, lt=1)] | None = None
    test: Path | None = None
    unlabelled: Path | None = None  # more training texts, only for soft labels of a teacher
    tokenizer: Annotated[str, Field(min_length=1)] | VocabularyTokenizer | JsonTokenizer
    max_length: RowLength = 128
    longer: Literal["refuse", "cut"] = "refuse"
    stride: Annotated[int, Field(ge=0)] = 128
    most: Annotated[int, Field(ge=1)] | None = None  # a sample of so many training examples
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0  # of that sample, and of the share
    licence: str = ""

    @model_validator(mode="after")
    def _fits(self) -> ExamplesConfig:
        if self.unlabelled is not None and self.task.probabilities is not None:
            raise ValueError("unlabelled texts have no probabilities: remove one of the two keys")
        if self.task.name == "question_answering" and self.stride >= self.max_length - 8:
            raise ValueError("stride must be less than max_length - 8")
        return self

    def files(self) -> dict[Split, Path]:
        """Return the files by split."""
        found: dict[Split, Path] = {"train": self.train}
        if isinstance(self.validation, Path):
            found["validation"] = self.validation
        if self.test is not None:
            found["test"] = self.test
        return found

    def content(self) -> dict[str, Any]:
        """Return the keys that shape the bytes: no paths, no licence.

        The manifest records the tokenizer's fingerprint, and hashes of the files are added.
        """
        without = {"output", "tokenizer", "train", "test", "unlabelled", "licence"}
        values = self.model_dump(mode="json", exclude=without)
        if isinstance(self.validation, Path):
            values["validation"] = "file"
        return values
