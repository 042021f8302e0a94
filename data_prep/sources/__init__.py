"""Readers: a source's entry in the corpus file -> its input files -> documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any

from pydantic import Field

from data_prep.sources import books, mediawiki, python_docs, tables, text, wikiextractor
from data_prep.sources.books import Books
from data_prep.sources.document import Document, Rejected
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
    "PythonDocs",
    "Rejected",
    "Sentences",
    "Source",
    "Text",
    "WikiExtractor",
    "inputs",
    "read",
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

# kind -> (source -> its inputs, (source, input) -> documents)
_READERS: dict[str, tuple[Callable[[Any], list[str]], Callable[[Any, str], Iterator[Any]]]] = {
    "mediawiki": (mediawiki.inputs, mediawiki.read),
    "wikiextractor": (wikiextractor.inputs, wikiextractor.read),
    "books": (books.inputs, books.read),
    "sentences": (text.inputs, text.read_sentences),
    "text": (text.inputs, text.read_text),
    "jsonl": (tables.jsonl_inputs, tables.read_jsonl),
    "parquet": (tables.parquet_inputs, tables.read_parquet),
    "huggingface": (tables.huggingface_inputs, tables.read_huggingface),
    "python_docs": (python_docs.inputs, python_docs.read),
}


def inputs(source: Source) -> list[str]:
    """The source's inputs, sorted: each is a unit of work that `read` takes on its own.

    Raises CorpusError when there are none.
    """
    return _READERS[source.kind][0](source)


def read(source: Source, input: str) -> Iterator[Document | Rejected]:
    """The documents of one input, in order and in bounded memory.

    A bad document is yielded as Rejected; a truncated or unreadable file raises CorpusError.
    """
    return _READERS[source.kind][1](source, input)
