"""What every reader yields, and the keys that every source has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath

from pydantic import BaseModel, ConfigDict, Field


@dataclass(frozen=True, slots=True)
class Document:
    """One text with an id that is unique within its source and never an absolute path."""

    text: str
    id: str
    title: str = ""
    url: str = ""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A document that could not be read: where it lies, a short reason, and a detail."""

    where: str
    reason: str
    detail: str = ""


class SourceKeys(BaseModel):
    """The keys of `sources:` entries that all kinds share; no behaviour lives here."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    name: str | None = None
    licence: str = "unknown"
    fraction: float = Field(default=1.0, gt=0.0, le=1.0)


class FileSource(SourceKeys):
    """A source that is a file, a folder (searched recursively) or a glob."""

    path: str = Field(min_length=1)

    @property
    def label(self) -> str:
        """The name given, else the last part of the path."""
        return self.name or PurePath(self.path).name or self.path
