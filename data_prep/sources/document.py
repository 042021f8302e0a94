"""Hold what a reader yields: a document, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

SKIPPED = "skip_documents"  # the reason why a document that the config names is left out
_begins: ContextVar[Callable[[str], bool]] = ContextVar("begins", default=lambda document: True)


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


def begins(document: str) -> bool:
    """Say that work on a document begins; return False if it is to be left out.

    Kinds whose documents may take long call it first, with the document's id.
    """
    return _begins.get()(document)


@contextmanager
def told(listener: Callable[[str], bool]) -> Iterator[None]:
    """Let `listener` answer what `begins` is called with in the block."""
    token = _begins.set(listener)
    try:
        yield
    finally:
        _begins.reset(token)
