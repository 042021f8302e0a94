"""Read tables in text files: CSV with quotes, and tab-separated values without."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import closing
from typing import Any, ClassVar, Literal

from data_prep import CorpusError
from data_prep.messages import error_line, one_line
from data_prep.sources.document import Document, Rejected
from data_prep.sources.files import LINE_LIMIT, LONG_LINE, Piece, file_chunks
from data_prep.sources.records import Record, RecordSource


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
