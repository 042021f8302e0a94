"""Readers: a source's entry in the corpus file -> pieces of its inputs -> documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any

from pydantic import Field

from data_prep.sources import books, files, mediawiki, python_docs, tables, text, wikiextractor
from data_prep.sources.books import Books
from data_prep.sources.document import Document, Piece, Rejected
from data_prep.sources.files import relative_name
from data_prep.sources.mediawiki import Mediawiki
from data_prep.sources.python_docs import PythonDocs
from data_prep.sources.tables import HuggingFace, Jsonl, Parquet
from data_prep.sources.text import Sentences, Text
from data_prep.sources.wikiextractor import WikiExtractor

__all__ = [
    "Books",
    "Document",
    "HuggingFace",
    "Jsonl",
    "Mediawiki",
    "Parquet",
    "Piece",
    "PythonDocs",
    "Rejected",
    "Sentences",
    "Source",
    "Text",
    "WikiExtractor",
    "name_of",
    "pieces",
    "read",
    "sha256",
    "version",
]

Source = Annotated[
    Mediawiki
    | WikiExtractor
    | Books
    | Sentences
    | Text
    | Jsonl
    | Parquet
    | HuggingFace
    | PythonDocs,
    Field(discriminator="kind"),
]

_Pieces = Callable[[Any, int], list[Piece]]
_Read = Callable[[Any, Piece], Iterator[Document | Rejected]]

_READERS: dict[str, tuple[_Pieces, _Read]] = {
    "mediawiki": (mediawiki.pieces, mediawiki.read),
    "wikiextractor": (wikiextractor.pieces, wikiextractor.read),
    "books": (books.pieces, books.read),
    "sentences": (text.pieces, text.read_sentences),
    "text": (text.pieces, text.read_text),
    "jsonl": (tables.jsonl_pieces, tables.read_jsonl),
    "parquet": (tables.parquet_pieces, tables.read_parquet),
    "huggingface": (tables.huggingface_pieces, tables.read_huggingface),
    "python_docs": (python_docs.pieces, python_docs.read),
}


def pieces(source: Source, limit: int) -> list[Piece]:
    """Return the source's inputs in order, cut into pieces of about `limit` bytes where they can
    be.

    Depends on nothing but the files and `limit`. Raises CorpusError when there are no inputs.
    """
    if limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    found: list[Piece] = _READERS[source.kind][0](source, limit)
    return found


def name_of(source: Source, piece: Piece) -> str:
    """Return what records call an input: its name within the source or on the hub, or a
    package's."""
    if isinstance(source, PythonDocs):
        return python_docs.versioned(piece.path)
    if isinstance(source, HuggingFace):
        return tables.dataset_name(piece)
    return relative_name(source.path, piece.path)


def version(piece: Piece) -> str:
    """Tell quickly in which state an input is; "" if its content alone can tell."""
    return _state(piece, files.version) if piece.kind != "file" else files.version(piece.path)


def sha256(piece: Piece) -> str:
    """Tell surely in which state an input is; "" if it is not there, or known by its commit."""
    if piece.kind != "file":
        return "" if piece.commit else _state(piece, lambda path: files.sha256(Piece(path)))
    return files.sha256(piece)


def _state(piece: Piece, of: Callable[[str], str]) -> str:
    if piece.kind == "package":
        return python_docs.state(piece.path, of)
    return piece.commit or files.state_of_folder(piece.path, tables.dataset_files(piece), of)


def read(source: Source, piece: Piece) -> Iterator[Document | Rejected]:
    """Yield the documents of one piece, in order and in bounded memory.

    All pieces together hold the documents of the inputs, each once, whatever `limit` was. A bad
    document is yielded as Rejected; a truncated or unreadable file raises CorpusError.
    """
    return _READERS[source.kind][1](source, piece)
