"""Hold what a reader yields: a document, or the reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Document:
    """Hold one text with an id that is unique within its source and never an absolute path.

    `notes` name properties of kept documents that the manifest counts ("cut short").
    """

    text: str
    id: str
    title: str = ""
    url: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Rejected:
    """Hold where an unreadable document lies, a short reason, and a detail."""

    where: str
    reason: str
    detail: str = ""
