"""Read Parquet files, by row groups.

Memory goes with the largest page, because a page is decompressed as a whole. The footer does not
give the sizes of pages, but a page is no larger than its column of the row group. A row group is
rejected if a column takes more than 128 MiB and expands 16-fold, or if its average record is too
long. Two cases remain: a false footer, and a large row group in one page. Such a page takes up to
three times its size, which is 2 GiB at most: the format has 32 bits for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, ClassVar, Literal

from data_prep import CorpusError
from data_prep.messages import error_line, one_line
from data_prep.sources.document import Document, Rejected
from data_prep.sources.files import LINE_LIMIT, Piece, opened
from data_prep.sources.tables import Record, RecordSource

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

_GROUP_LIMIT = 1 << 27  # bytes; reading a page takes up to three times its size
# Text is compressed to a third or a tenth. Snappy reaches 21 on equal bytes, others thousands.
_BOMB_RATIO = 16
_BATCH = 1 << 26  # bytes, if each record were as large as its row group


class FooterError(CorpusError):
    """Report a footer that cannot be read, or lacks a column."""


@dataclass(frozen=True, slots=True)
class RowGroups(Piece):
    """Hold the row groups `start` to `end` of a Parquet file."""

    crossed: ClassVar[bool] = False

    def stored_ranges(self) -> list[tuple[int, int | None]]:
        """Return where the columns of the row groups lie, and the footer.

        A file whose footer cannot be read is one range.
        """
        import pyarrow
        from pyarrow import parquet

        with opened(self.path, seekable=True) as file:
            size = file.seek(0, 2)
            try:
                metadata = parquet.read_metadata(file)
            except (pyarrow.ArrowException, OSError):
                return [(0, size)]
        starts, ends = [], []
        for number in range(self.start, metadata.num_row_groups if self.end is None else self.end):
            group = metadata.row_group(number)
            for column in map(group.column, range(group.num_columns)):
                start = column.data_page_offset
                if column.has_dictionary_page and column.dictionary_page_offset:
                    start = min(start, column.dictionary_page_offset)
                starts.append(start)
                ends.append(start + column.total_compressed_size)
        columns = [(min(starts), max(ends))] if starts else []
        return [*columns, (size - metadata.serialized_size - 8, size)]


class Parquet(RecordSource):
    """Read Parquet files."""

    patterns: ClassVar[tuple[str, ...]] = ("*.parquet",)
    cut_by_content: ClassVar[bool] = True
    pieces: ClassVar[tuple[type[Piece], ...]] = (RowGroups,)

    kind: Literal["parquet"] = "parquet"

    def cut(self, file: Piece, limit: int) -> list[Piece]:
        """Return row groups, together of about `limit` decompressed bytes; reads only the footer.

        A file that is damaged, or lacks a column, is whole: its unit says so.
        """
        with opened(file.path, seekable=True) as stored:
            try:
                metadata = self._opened(file.path, stored).metadata
            except FooterError:
                return [RowGroups(file.path, size=file.size)]
            groups = map(metadata.row_group, range(metadata.num_row_groups))
            sizes = [group.total_byte_size for group in groups]
        found: list[Piece] = []
        start, total = 0, 0
        for number, size in enumerate(sizes):
            if total and total + size > limit:
                found.append(RowGroups(file.path, start, number, total))
                start, total = number, 0
            total += size
        return [*found, RowGroups(file.path, start, len(sizes), total)]

    def documents(self, piece: Piece) -> Iterator[Document | Rejected]:
        """Yield the records of row groups; CorpusError if the file is damaged.

        With pages of up to 128 MiB this takes up to 400 MB beyond a few documents.
        """
        with opened(piece.path, seekable=True) as stored:
            file = self._opened(piece.path, stored)
            sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
            groups = range(piece.start, len(sizes) if piece.end is None else piece.end)
            records = (record for group in groups for record in self._records(file, group))
            before = sum(sizes[: piece.start])
            yield from self.numbered_documents(records, piece.path, self.input_name(piece), before)

    def _opened(self, path: str, stored: BinaryIO) -> ParquetFile:
        """Return the file with its footer read; CorpusError if a column is missing."""
        import pyarrow
        from pyarrow import parquet

        try:
            # Not buffered, a column of a row group would be read at once, however long.
            file = parquet.ParquetFile(
                stored, buffer_size=1 << 20, pre_buffer=False, page_checksum_verification=True
            )
            names = file.schema_arrow.names
        except (pyarrow.ArrowException, OSError) as error:
            kind = FooterError if isinstance(error, pyarrow.ArrowException) else CorpusError
            raise kind(
                f"{one_line(path)}: unreadable ({error_line(error)}); download it again"
            ) from None
        if missing := [column for column in self.columns if column not in names]:
            raise FooterError(
                f"{one_line(path)}: no column {missing[0]!r}; it has {', '.join(names)}"
            )
        return file

    def check(self, pieces: Sequence[Piece]) -> None:
        """Refuse the source if the first file of it, and some others, are damaged or lack a column.

        All would be, where a key is wrong.
        """
        first: FooterError | None = None
        for path in self.sampled(pieces):
            with opened(path, seekable=True) as stored:
                try:
                    self._opened(path, stored)
                    return
                except FooterError as error:
                    first = first or error
        if first is not None:
            raise first

    def _records(self, file: ParquetFile, number: int) -> Iterator[Record]:
        """Yield the records of one row group, each as Rejected if the footer claims a bomb."""
        import pyarrow

        group = file.metadata.row_group(number)
        largest = 1
        for column in map(group.column, range(group.num_columns)):
            # The path of a nested column goes on behind the name.
            if not {column.path_in_schema, column.path_in_schema.split(".")[0]} & {*self.columns}:
                continue
            size, stored = column.total_uncompressed_size, column.total_compressed_size
            usual = min(_BOMB_RATIO * stored, LINE_LIMIT * group.num_rows)
            if size > max(_GROUP_LIMIT, usual):
                detail = f"in a row group of {size} bytes from {stored}; write smaller row groups"
                for _ in range(group.num_rows):
                    yield Rejected("", "too long", detail)
                return
            largest = max(largest, size)
        rows = min(256, max(1, _BATCH // largest))
        for batch in file.iter_batches(rows, [number], self.columns, use_threads=False):
            # A slice of a dictionary's column counts the whole dictionary as its bytes.
            columns = [
                column.dictionary_decode() if pyarrow.types.is_dictionary(column.type) else column
                for column in batch.columns
            ]
            batch = pyarrow.record_batch(columns, names=batch.schema.names)
            if batch.nbytes <= LINE_LIMIT:
                try:
                    records = batch.to_pylist()
                except UnicodeDecodeError:
                    pass  # Arrow does not check what it reads
                else:
                    yield from records
                    continue
            for place in range(len(batch)):
                row = batch.slice(place, 1)
                if row.nbytes > LINE_LIMIT:
                    yield Rejected("", "too long", f"a record of {row.nbytes} bytes")
                    continue
                try:
                    record = row.to_pylist()[0]
                except UnicodeDecodeError as error:
                    detail = f"{error.reason} at byte {error.start} of it"
                    yield Rejected("", "not utf-8", detail)
                else:
                    yield record
