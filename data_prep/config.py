"""Define the corpus file that `distil prepare` reads."""

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from data_prep.keys import Keys
from data_prep.sources import Source

Normalization = Literal["none", "nfc", "nfkc"]


class TrainWordPiece(Keys):
    """Hold the settings of a WordPiece vocabulary that is trained on the corpus.

    BERT strips accents wherever it lower-cases; here these are two keys.
    """

    kind: Literal["wordpiece"] = "wordpiece"
    vocab_size: Annotated[int, Field(ge=100, le=2**20)] = 30522
    """How many entries; 30,522 as BERT."""
    lowercase: bool = True
    """Read text in lower case, as bert-base-uncased."""
    strip_accents: bool = False
    """Read letters without their accents, which distinguish words."""
    normalization: Normalization = "none"
    """Unicode form in which text is read; BERT has none, and a corpus is NFC already."""

    @model_serializer(mode="wrap")
    def without_later_keys(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out later keys at their defaults: finished corpora recorded a config without."""
        later = {"kind": "wordpiece", "normalization": "none"}
        return {key: value for key, value in dump(self).items() if later.get(key) != value}


class TrainByteLevelBPE(Keys):
    """Hold the settings of a byte-level BPE that is trained on the corpus, as RoBERTa has one.

    Every text can be written in it, so [UNK] never occurs. Its special tokens are RoBERTa's.
    """

    kind: Literal["byte-level-bpe"]
    vocab_size: Annotated[int, Field(ge=300, le=2**20)] = 50265
    """How many entries; 50,265 as RoBERTa."""
    lowercase: bool = False
    """Read text in lower case; roberta-base does not."""
    strip_accents: bool = False
    """Read letters without their accents."""
    normalization: Normalization = "nfc"
    """Unicode form in which text is read: that of a cleaned corpus."""


class TrainTokenizer(Keys):
    """Hold `tokenizer: {train: {...}}`."""

    train: Annotated[TrainWordPiece | TrainByteLevelBPE, Field(discriminator="kind")]
    """Settings of a tokenizer that is trained on the corpus."""

    @model_validator(mode="before")
    @classmethod
    def wordpiece_by_default(cls, values: Any) -> Any:
        """Fill in the kind: `train: {vocab_size: 8000}` means WordPiece."""
        if isinstance(values, dict) and isinstance(train := values.get("train"), dict):
            values = {**values, "train": {"kind": TrainWordPiece().kind, **train}}
        return values


class VocabularyTokenizer(Keys):
    """Hold `tokenizer: {vocab: vocab.txt, pattern: REGEX}`, for symbols that are no words.

    Without a pattern it is a WordPiece vocabulary. `lowercase` defaults to false with a pattern,
    else to true if no entry has an upper-case letter.
    """

    vocab: Path
    """A vocab.txt, an entry a line."""
    pattern: str | None = None
    """Regex of one token, such as an atom of SMILES. None: WordPiece."""
    lowercase: bool | None = None
    """None: with a pattern no, else if no entry has an upper-case letter."""


class JsonTokenizer(Keys):
    """Hold `tokenizer: {path: tokenizer.json, mask: <m>}`, for tokens the file does not name.

    [CLS] and [SEP] are read from its post-processor. The others are found by their usual names.
    """

    path: Path
    """A tokenizer.json of the library tokenizers."""
    pad: str | None = None
    """The token that fills rows, and so below, where the file does not say which it is."""
    unk: str | None = None
    """The token of what is not in the vocabulary."""
    cls: str | None = None
    """The token at the start of a document."""
    sep: str | None = None
    """The token at its end."""
    mask: str | None = None
    """The token in place of what is to be predicted."""


Level = Literal["none", "exact", "near"]


class Deduplicate(Keys):
    """Define duplicates: identical text, or (near) an estimated Jaccard of `threshold`.

    The first of several equal documents is kept. Repeated paragraphs (long lines) are taken out of
    all documents but the first.
    """

    documents: Level = "near"
    """Drop documents that are equal, or near: of 20 words or more and an estimated similarity of
    `threshold`. The first one stays.
    """
    paragraphs: Level = "none"
    """Take repeated paragraphs (long lines) out of all documents but the first."""
    threshold: Annotated[float, Field(ge=0.7, le=1)] = 0.8
    """Jaccard similarity of two documents' 5-word shingles; 1: equal sets."""


class Decontaminate(Keys):
    """Name evaluation files whose n-grams no document should share (Brown et al. 2020, C).

    Documents that share one, or hold a short text whole, are counted and named; `remove` drops
    them.
    """

    files: Annotated[tuple[Path, ...], Field(min_length=1)]
    """Evaluation files: a document that shares an n-gram with one, or holds a short text whole, is
    counted and named.
    """
    remove: bool = False
    """Drop these documents; a quotation is also a match."""


_NOT_WRITTEN = {"memory", "http", "https", "data", "github", "git", "zip", "tar", "hf"}
SHAPES_NOTHING = {"output", "workers", "work", "max_unknown"}  # keys, of the shards' bytes
RowLength = Annotated[int, Field(ge=8, le=4096)]


class CorpusConfig(Keys):
    """Hold a corpus: its sources, its tokenizer and the shape of its rows."""

    output: Path
    """Local folder of the shards."""
    sources: Annotated[tuple[Source, ...], Field(min_length=1)]
    """What is read: a list of entries with a `kind`."""
    tokenizer: (
        Annotated[str, Field(min_length=1)] | TrainTokenizer | VocabularyTokenizer | JsonTokenizer
    ) = "bert-base-uncased"
    """Name on the hub or folder of a model, whose tokenizer it is, or one of the sections below."""
    row_length: RowLength | Annotated[tuple[RowLength, ...], Field(min_length=1)] = 512
    """Tokens of a row; several lengths are packed to a folder each."""
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.005
    """Share of the documents that training does not read. A single document with a larger share
    of the text is trained on, unless the smaller ones have too little text.
    """
    min_characters: Annotated[int, Field(ge=1)] = 1
    """Shortest document, after cleaning."""
    max_characters: Annotated[int, Field(ge=1)] | None = None
    """Longest document. None: no limit."""
    deduplicate: Deduplicate = Deduplicate()
    """Which documents count as duplicates."""
    decontaminate: Decontaminate | None = None
    """Which texts no document should share."""
    workers: Annotated[int, Field(ge=1, le=1024)] = Field(
        default_factory=lambda: os.cpu_count() or 1
    )
    """Processes, by default one for each core; the result is the same with any number."""
    work: Annotated[str, Field(min_length=1)] | None = None
    """URL or path of what stages write for each other, for machines that share no `output`: a
    task copies what it reads and sends what it writes. None: in `output`.
    """
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Of the split, `fraction` of sources, and samples."""
    skip_documents: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Documents to leave out: an id, or SOURCE:INPUT@START/ID as an error names one."""
    keep_text: bool = False
    """Also write the cleaned text of each whole document, so that an encoder with another
    vocabulary can teach. It takes the disk space of the text.
    """
    max_unknown: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of tokens that may be unknown: with more the tokenizer is not of this text."""

    @model_validator(mode="after")
    def _check_work(self) -> "CorpusConfig":
        if self.work is None:
            return self

        read = {str(path) for s in self.sources if (path := getattr(s, "path", None))}
        for other in (str(self.output), *read):
            if _inside(self.work, other) or (other not in read and _inside(other, self.work)):
                raise ValueError(f"work lies in {other}, or the other way round: choose another")
        return self

    @field_validator("output", mode="before")
    @classmethod
    def _local(cls, value: Any) -> Any:
        if "://" in str(value):
            raise ValueError("a local folder; `--upload URL` copies the shards when they are done")
        return value

    @field_validator("skip_documents")
    @classmethod
    def _in_order(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(sorted(set(value)))

    @field_validator("work")
    @classmethod
    def _from_here(cls, value: str | None) -> str | None:
        if value is None:
            return None
        protocol, colon, place = value.rpartition("://")
        if re.search(r"[*?\[\]]|::|^\w+(:/?[^/]|//)", value) or (colon and not place.strip("/")):
            raise ValueError("give the path of a folder, or a URL such as s3://bucket/work")
        if protocol in _NOT_WRITTEN:
            raise ValueError(f"{protocol}:// is not shared, or is only read: give another place")
        return value if colon and protocol != "file" else os.path.abspath(place)

    @model_validator(mode="after")
    def _check_together(self) -> "CorpusConfig":
        for source in self.sources:
            path = getattr(source, "path", "")
            if os.path.isdir(path) and _inside(str(self.output), str(path)):
                raise ValueError(f"output lies in the source {path}, which would then read it")
        if self.max_characters is not None and self.max_characters < self.min_characters:
            raise ValueError("max_characters must not be less than min_characters")
        return self

    @field_validator("row_length")
    @classmethod
    def _each_once(cls, value: int | tuple[int, ...]) -> int | tuple[int, ...]:
        if isinstance(value, tuple) and len(set(value)) < len(value):
            raise ValueError("the same length is there twice")
        return value

    @property
    def row_lengths(self) -> tuple[int, ...]:
        """Return all lengths that rows are packed to."""
        return self.row_length if isinstance(self.row_length, tuple) else (self.row_length,)

    def folder(self, row_length: int) -> Path:
        """Return where the shards of one length lie: `output`, or a folder in it if there are
        several."""
        several = isinstance(self.row_length, tuple)
        return self.output / str(row_length) if several else self.output

    def content(self, row_length: int) -> dict[str, Any]:
        """Return the keys that shape the bytes of one length: no paths, names, licences or workers.

        A tokenizer given by name or path is left out: the manifest records its fingerprint.
        """
        values = self.model_dump(mode="json", exclude=SHAPES_NOTHING)
        values["row_length"] = row_length
        if not self.keep_text:  # a later key: finished corpora recorded a config without it
            del values["keep_text"]
        if not self.skip_documents:
            del values["skip_documents"]
        values["sources"] = [source_keys(source) for source in self.sources]
        if not isinstance(self.tokenizer, TrainTokenizer):
            del values["tokenizer"]
        if self.decontaminate is not None:
            del values["decontaminate"]["files"]  # their content counts, and is recorded
            values["decontaminate"]["algorithm"] = 2  # the first one missed most short texts
        return values


def _inside(inner: str, outer: str) -> bool:
    """Return whether a path or URL lies in, or is, another."""
    if "://" in inner or "://" in outer:
        return f"{inner.rstrip('/')}/".startswith(f"{outer.rstrip('/')}/")
    return Path(os.path.realpath(inner)).is_relative_to(os.path.realpath(outer))


def source_keys(source: Source) -> dict[str, Any]:
    """Return what of a source's entry shapes its documents."""
    values: dict[str, Any] = source.model_dump(mode="json")
    return {key: value for key, value in values.items() if key not in ("path", "name", "licence")}
