"""Turn records (an object of JSON, a row of a table) into documents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from data_prep import CorpusError
from data_prep.messages import error_line, one_line
from data_prep.sources.document import SKIPPED, Document, Rejected, begins
from data_prep.sources.files import Piece
from data_prep.sources.kind import FileSource
from data_prep.text.wikipedia import repaired

_FILES = 20  # that are looked at before all are read
_METADATA_LIMIT = 1 << 14  # characters of an id, a title or a link

Record = Mapping[str, Any] | Rejected  # the latter without its `where`


class RecordSource(FileSource):
    """Name the fields (columns) to read; without `id_field`, an id is the record's place.

    `cleaning: wikipedia` repairs what other tools' extraction from Wikipedia leaves in the text.
    """

    text_field: str = "text"
    """Field or column of the text."""
    id_field: str | None = None
    """That of a document's id. None: its place."""
    title_field: str | None = None
    """That of its title."""
    url_field: str | None = None
    """That of its address."""
    cleaning: Literal["none", "wikipedia"] = "none"
    """`wikipedia` also removes what is left of wiki markup."""

    @property
    def is_wikipedia(self) -> bool:
        """Return whether the texts are to be cleaned as Wikipedia's."""
        return self.cleaning == "wikipedia"

    @staticmethod
    def sampled(pieces: Sequence[Piece]) -> list[str]:
        """Return the paths of some files, evenly spread: all of up to 39, else 20 to 39 of them."""
        files = [piece.path for piece in pieces if piece.start == 0]
        return files[:: max(1, len(files) // _FILES)]

    @property
    def columns(self) -> list[str]:
        """Return the fields that are read, each once."""
        wanted = [self.text_field, self.id_field, self.title_field, self.url_field]
        return [column for column in dict.fromkeys(wanted) if column is not None]

    def numbered_documents(
        self, records: Iterator[Record], path: str, stem: str, before: int = 0
    ) -> Iterator[Document | Rejected]:
        """Yield each record's document, with its number in the ids; `before` records came earlier.

        Raises CorpusError if the records end in an error.
        """
        number = before
        while True:
            # A file, a store or a download may raise any error; a CorpusError is already ours.
            try:
                record = next(records, None)
            except CorpusError:
                raise
            except Exception as error:
                raise CorpusError(
                    f"{one_line(path)}: unreadable after {number} records ({error_line(error)}); "
                    "download it again"
                ) from None
            if record is None:
                return
            number += 1
            yield self.document(record, f"{stem}#{number}")

    def document(self, record: Record, where: str) -> Document | Rejected:
        """Return the document of one record."""
        if isinstance(record, Rejected):
            return replace(record, where=where)
        text = record.get(self.text_field)
        if not isinstance(text, str):
            problem = "has no" if text is None else f"has a {type(text).__name__} as"
            return Rejected(where, "no text", f"{problem} {self.text_field!r}")
        values = [
            str(record.get(key) if record.get(key) is not None else "") if key else ""
            for key in (self.id_field, self.title_field, self.url_field)
        ]
        # Valid JSON can spell half a surrogate pair, which neither tokenizers nor Arrow can encode.
        try:
            for value in (text, *values):
                value.encode()
        except UnicodeEncodeError:
            return Rejected(where, "lone surrogate")
        if max(map(len, values)) > _METADATA_LIMIT:
            detail = f"id, title or link above {_METADATA_LIMIT} characters"
            return Rejected(where, "too long", detail)
        if not begins(values[0] or where):
            return Rejected(where, SKIPPED)
        if self.cleaning == "wikipedia":
            text = repaired(text)
        if not text.strip():
            return Rejected(where, "empty")
        return Document(text, values[0] or where, values[1], values[2])
