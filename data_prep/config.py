"""The corpus file: what `distil prepare` reads."""

import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from data_prep.sources import Source

FROZEN = ConfigDict(frozen=True, extra="forbid")


class TrainWordPiece(BaseModel):
    """A WordPiece vocabulary to train on the corpus itself."""

    model_config = FROZEN
    vocab_size: Annotated[int, Field(ge=100, le=2**20)] = 30522
    lowercase: bool = True


class TrainTokenizer(BaseModel):
    """`tokenizer: {train: {...}}`."""

    model_config = FROZEN
    train: TrainWordPiece


class VocabularyTokenizer(BaseModel):
    """`tokenizer: {vocab: vocab.txt, pattern: REGEX}`: symbols that are no words.

    Without a pattern the vocabulary is a WordPiece one; `lowercase` left out means: as WordPiece,
    lower-case if no entry has an upper-case letter; with a pattern, no.
    """

    model_config = FROZEN
    vocab: Path
    pattern: str | None = None
    lowercase: bool | None = None


class CorpusConfig(BaseModel):
    """A corpus: its sources, its tokenizer and the shape of its rows."""

    model_config = FROZEN
    output: Path
    sources: Annotated[tuple[Source, ...], Field(min_length=1)]
    tokenizer: str | TrainTokenizer | VocabularyTokenizer = "bert-base-uncased"
    row_length: Annotated[int, Field(ge=8, le=4096)] = 512
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.005
    min_characters: Annotated[int, Field(ge=1)] = 1
    max_characters: Annotated[int, Field(ge=1)] | None = None
    workers: Annotated[int, Field(ge=1)] = Field(default_factory=lambda: os.cpu_count() or 1)
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0

    @model_validator(mode="after")
    def _lengths_in_order(self) -> "CorpusConfig":
        if self.max_characters is not None and self.max_characters < self.min_characters:
            raise ValueError("max_characters must not be less than min_characters")
        return self

    @property
    def content(self) -> dict[str, Any]:
        """The keys that shape bytes: no paths, names, licences or workers.

        A tokenizer given by name or path is left out: the manifest records its fingerprint.
        """
        values = self.model_dump(mode="json", exclude={"output", "workers"})
        for source in values["sources"]:
            for key in ("path", "name", "licence"):
                source.pop(key, None)
        if not isinstance(self.tokenizer, TrainTokenizer):
            del values["tokenizer"]
        return values
