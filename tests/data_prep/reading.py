"""Share what the tests of all readers need."""

from collections.abc import Iterator
from typing import Any

from data_prep.sources import Document, Rejected

LIMITS = (1, 7, 64, 1000, 10**9)


def read_all(source: Any, limit: int = 10**9) -> list[Document | Rejected]:
    """Read all pieces of a source, one after another."""
    return [item for piece in source.inputs(limit) for item in source.documents(piece)]


def documents(items: list[Document | Rejected]) -> list[Document]:
    """Return the items that could be read."""
    return [item for item in items if isinstance(item, Document)]


def reasons(items: list[Document | Rejected]) -> list[tuple[str, str]]:
    """Return place and reason of each item that could not be read."""
    return [(item.where, item.reason) for item in items if isinstance(item, Rejected)]


def lines_of(raw: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line) of a whole file with a plain split, as a reference."""
    offset = 0
    for line in raw.split(b"\n"):
        yield offset, line.removesuffix(b"\r")
        offset += len(line) + 1
