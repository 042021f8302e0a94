"""Define the file of a task's data that `distil prepare` reads; it has a section `task:`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

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
    """What is predicted."""
    text: Column | None = None
    """Column of the text: a name, or its place from 0 in a file without a line of names, and so
    below. None: `text`, of question answering `question`.
    """
    pair: Column | None = None
    """Column of a second text. None: of question answering `context`, else there is none."""
    label: Column | None = None
    """Column of the label. None: `label`, of tagging `tags`, of answers `answers`."""
    probabilities: Column | tuple[Column, ...] | None = None
    """Classification with `labels` only: the column that lists each example's probabilities (a
    large model's, for instance), or one column per label.
    """
    id: Column | None = None
    """Column of a name of the example. None: its number in the file."""
    labels: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Classes in the order of their numbers. Without it they are sorted. A number in the data is
    the place of a label, unless the labels are numbers.
    """
    metric: str | None = None
    """The score of a model. None: the usual one of the task."""

    @model_validator(mode="after")
    def _fits(self) -> Columns:
        if self.metric not in (None, *_METRICS[self.name]):
            raise ValueError(f"metric: for {self.name} use {', '.join(_METRICS[self.name])}")
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
    """Local folder of the shards."""
    task: Columns
    """What an example is, and which columns have its parts."""
    train: Path
    """File, or folder, of training examples."""
    validation: Path | Annotated[float, Field(gt=0, lt=1)] | None = None
    """File of validation examples, or a share of the training examples."""
    test: Path | None = None
    """File of test examples."""
    unlabelled: Path | None = None
    """More training texts, which only learn a teacher's soft labels: a file, or a folder of shards
    that keeps its texts. What is too long is left out.
    """
    tokenizer: Annotated[str, Field(min_length=1)] | VocabularyTokenizer | JsonTokenizer
    """Name or folder of a model, whose tokenizer it is, or a section as in a corpus."""
    max_length: RowLength = 128
    """Longest example in tokens; of question answering more than `stride` + 8."""
    longer: Literal["refuse", "cut"] = "refuse"
    """What happens to a longer one. A context of question answering becomes several rows."""
    stride: Annotated[int, Field(ge=0)] = 128
    """Tokens that two rows of one context share, in question answering."""
    most: Annotated[int, Field(ge=1)] | None = None
    """A sample of so many training examples."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of that sample, and of the validation share."""
    allow_shared: bool = False
    """Accept files even if more than a tenth of the texts of one are also in another."""
    max_unknown: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Largest accepted share of unknown tokens: above it the tokenizer does not fit the text."""
    licence: str = ""
    """Licence of the data, shown on the model card."""

    @field_validator("validation", mode="before")
    @classmethod
    def _is_a_share_or_a_file(cls, value: Any) -> Any:
        share = isinstance(value, int | float) and not 0 < value < 1
        if share or str(value).endswith("%"):
            raise ValueError("give a share below 1, such as 0.1, or a file")
        return value

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
        without |= {"allow_shared", "max_unknown"}
        values = self.model_dump(mode="json", exclude=without)
        if isinstance(self.validation, Path):
            values["validation"] = "file"
        return values
