"""Read corpora: a source's entry in the corpus file -> pieces of its inputs -> documents.

A kind of source is a class with `kind: Literal[...]` in a file of this folder, and a member of
`Source` below. Nothing else names it.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from data_prep.sources.books import Books
from data_prep.sources.document import Document, Rejected
from data_prep.sources.files import Piece
from data_prep.sources.hub import HuggingFace
from data_prep.sources.mediawiki import Mediawiki
from data_prep.sources.row_groups import Parquet
from data_prep.sources.tables import Csv, Jsonl, Tsv
from data_prep.sources.text import Sentences, Text
from data_prep.sources.wikiextractor import WikiExtractor

__all__ = [
    "Books",
    "Csv",
    "Document",
    "HuggingFace",
    "Jsonl",
    "Mediawiki",
    "Parquet",
    "Piece",
    "Rejected",
    "Sentences",
    "Source",
    "Text",
    "Tsv",
    "WikiExtractor",
]

Source = Annotated[
    Mediawiki
    | WikiExtractor
    | Books
    | Sentences
    | Text
    | Jsonl
    | Csv
    | Tsv
    | Parquet
    | HuggingFace,
    Field(discriminator="kind"),
]
