"""What every reader yields, and the keys that every source has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

from pydantic import Field, field_validator

from data_prep.keys import Keys
from data_prep.sources.remote import bare, is_remote
from data_prep.text.language import CODES


@dataclass(frozen=True, slots=True)
class Document:
    """One text with an id that is unique within its source and never an absolute path.

    `notes` are what a person may want counted of documents that are kept ("cut short").
    """

    text: str
    id: str
    title: str = ""
    url: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """An input or a part of one, read on its own: bytes `start` to `end` as stored (None: the end).

    Of a parquet file, the row groups `start` to `end`. `size` is its bytes, for planning. An
    installed package is a whole piece, and so is a dataset; `commit` is that of one of the hub.
    """

    path: str
    start: int = 0
    end: int | None = None
    size: int = 0
    kind: Literal["file", "package", "dataset"] = "file"
    commit: str = ""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A document that could not be read: where it lies, a short reason, and a detail."""

    where: str
    reason: str
    detail: str = ""


class SourceKeys(Keys):
    """The keys of `sources:` entries that all kinds share; no behaviour lives here.

    `languages` are ISO 639-1 codes: a text that is surely in another language is dropped.
    """

    name: str | None = None
    licence: str = "unknown"
    fraction: float = Field(default=1.0, gt=0.0, le=1.0)
    languages: tuple[str, ...] | None = None

    @field_validator("languages")
    @classmethod
    def _codes(cls, languages: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if languages is not None and not languages:
            raise ValueError("no language is named; leave the key out to keep all")
        for code in languages or ():
            if code not in CODES:
                raise ValueError(f"{code!r} is no language code such as en or de")
        return languages


class FileSource(SourceKeys):
    """A source that is a file, a folder (searched recursively), a glob, or a URL of one of these.

    URLs are read through fsspec: s3://, gs://, hf://, https:// and whatever else it knows.
    """

    path: str = Field(min_length=1)

    @property
    def label(self) -> str:
        """Return the name given, else the last part of the path."""
        path = bare(self.path) if is_remote(self.path) else self.path
        return self.name or PurePath(path).name or path
