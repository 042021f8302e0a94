"""Turn records into documents: JSON Lines objects, and rows of CSV (quoted) or TSV (unquoted)."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from itertools import islice
from typing import Any, ClassVar, Literal

from data_prep import CorpusError
from data_prep.messages import error_line, one_line
from data_prep.sources.document import SKIPPED, Document, Rejected, begins
from data_prep.sources.files import LINE_LIMIT, LONG_LINE, Piece, file_chunks, lines
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
        """Return the paths of evenly spread files: all if there are up to 39, else 20 to 39."""
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


_FIELDS_SHOWN = 100  # characters
_RECORDS = 100  # so many records of a file are read for their fields


class Jsonl(RecordSource):
    """Read JSON lines, plain or compressed: one object a line."""

    patterns: ClassVar[tuple[str, ...]] = tuple(
        name + end
        for name in ("*.jsonl", "*.ndjson", "*.json")
        for end in ("", ".gz", ".bz2", ".zst")
    )

    by_range: ClassVar[bool] = True

    kind: Literal["jsonl"] = "jsonl"

    def documents(self, piece: Piece) -> Iterator[Document | Rejected]:
        """Yield the records that begin in a piece; CorpusError if a file is cut short."""
        name = self.input_name(piece)
        for offset, line in lines(piece.path, piece.start, piece.end):
            where = f"{name}@{offset}"
            if line is None:
                yield Rejected(where, "too long", LONG_LINE)
                continue
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8-sig"))
            except UnicodeDecodeError as error:
                detail = f"{error.reason} at byte {error.start} of the line"
                yield Rejected(where, "not utf-8", detail)
            except (ValueError, RecursionError) as error:
                yield Rejected(where, "malformed json", error_line(error))
            else:
                if isinstance(record, dict):
                    yield self.document(record, where)
                else:
                    detail = f"no object but a {type(record).__name__}"
                    yield Rejected(where, "malformed json", detail)

    def check(self, pieces: Sequence[Piece]) -> None:
        """Refuse a field that none of the first records of some files has.

        A document without one is set aside or gets another id, so a wrong key would leave out all
        texts in silence.
        """
        missing, first, num = dict.fromkeys(self.columns), "", 0
        for path in self.sampled(pieces):
            with suppress(CorpusError):  # the file is damaged: its unit says so
                for _, line in islice(lines(path), _RECORDS):
                    try:
                        record = json.loads((line or b"").decode("utf-8-sig"))
                    except (ValueError, RecursionError):
                        continue
                    if isinstance(record, dict):
                        num += 1
                        first = first or one_line(", ".join(record), _FIELDS_SHOWN)
                        missing = {key: None for key in missing if key not in record}
            if not missing:
                return
        if num:
            raise CorpusError(
                f"{one_line(self.path)}: none of its first {num:,} records has a field "
                f"{next(iter(missing))!r}; the first one has {first}: correct the key"
            )


class Table(RecordSource):
    """Read a table whose first line names its columns, by pyarrow, whole files at a time."""

    delimiter: ClassVar[str]
    quote: ClassVar[str | Literal[False]]

    def documents(self, piece: Piece) -> Iterator[Document | Rejected]:
        """Yield the records of a file; CorpusError if it has no such column, or is damaged."""
        records = self._records(piece.path)
        yield from self.numbered_documents(records, piece.path, self.input_name(piece))

    def _records(self, path: str) -> Iterator[Record]:
        import pyarrow
        from pyarrow import csv

        bad: list[Rejected] = []

        def skip(row: Any) -> str:
            detail = f"{row.actual_columns} fields instead of {row.expected_columns}"
            bad.append(Rejected("", "malformed row", detail))
            return "skip"

        # As bytes: of a table that is not UTF-8 only the rows that are not are rejected.
        types = dict.fromkeys(self.columns, pyarrow.binary())
        options = {
            # A record may not be longer than a block.
            "read_options": csv.ReadOptions(use_threads=False, block_size=LINE_LIMIT),
            "parse_options": csv.ParseOptions(
                delimiter=self.delimiter,
                quote_char=self.quote,
                newlines_in_values=self.quote is not False,
                invalid_row_handler=skip,
            ),
        }
        convert = csv.ConvertOptions(include_columns=self.columns, column_types=types)
        try:
            with closing(_Stream(path)) as file:
                for batch in csv.open_csv(file, convert_options=convert, **options):
                    yield from bad
                    bad.clear()
                    for record in batch.to_pylist():
                        yield _decoded(record)
                yield from bad
        except KeyError:
            with closing(_Stream(path)) as file:
                names = csv.open_csv(file, **options).schema.names
            missing = [column for column in self.columns if column not in names]
            raise CorpusError(
                f"{one_line(path)}: no column {missing[0]!r}; it has {one_line(', '.join(names))}"
            ) from None
        except pyarrow.ArrowException as error:
            text = LONG_LINE if "straddling" in str(error) else error_line(error)
            raise CorpusError(f"{one_line(path)}: is not such a table ({text})") from None


class Csv(Table):
    """Read comma-separated values: a field in double quotes may hold commas and line ends."""

    patterns: ClassVar[tuple[str, ...]] = ("*.csv", "*.csv.gz", "*.csv.bz2", "*.csv.zst")
    delimiter, quote = ",", '"'

    kind: Literal["csv"] = "csv"


class Tsv(Table):
    """Read tab-separated values, in which a quotation mark is a character as any other."""

    patterns: ClassVar[tuple[str, ...]] = ("*.tsv", "*.tsv.gz", "*.tsv.bz2", "*.tsv.zst")
    delimiter, quote = "\t", False

    kind: Literal["tsv"] = "tsv"


class _Stream(io.RawIOBase):
    """Hold the decompressed bytes of a file as a stream."""

    def __init__(self, path: str) -> None:
        self._chunks, self._left = file_chunks(path), b""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        while len(self._left) < size or size < 0:
            if not (chunk := next(self._chunks, b"")):
                break
            self._left += chunk
        size = len(self._left) if size < 0 else size
        found, self._left = self._left[:size], self._left[size:]
        return found


def _decoded(record: dict[str, bytes]) -> Record:
    try:
        return {key: value.decode() for key, value in record.items()}
    except UnicodeDecodeError as error:
        return Rejected("", "not utf-8", f"{error.reason} at byte {error.start} of a field")
