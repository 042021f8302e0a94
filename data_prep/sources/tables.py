"""Texts in records: JSON lines, parquet, and datasets of the Hugging Face hub."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from data_prep import CorpusError
from data_prep.sources.document import Document, FileSource, Piece, Rejected
from data_prep.sources.files import LINE_LIMIT, LONG_LINE, cut, lines, opened, relative_name, whole
from data_prep.sources.pages import largest_page
from data_prep.sources.remote import shown
from data_prep.text.wikipedia import repaired

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyarrow.parquet import ParquetFile

_METADATA_LIMIT = 1 << 14  # characters of an id, a title or a link
_PAGE_LIMIT = 1 << 27  # bytes; reading a page takes up to three times as many
_BATCH = 1 << 26  # bytes, if each record were as large as the largest page

Record = Mapping[str, Any] | Rejected  # the latter without its `where`


class RecordSource(FileSource):
    """The names of the fields (columns) to read; without `id_field`, ids say where a record lies.

    `cleaning: wikipedia` mends what other tools' extraction from Wikipedia leaves in the text.
    """

    text_field: str = "text"
    id_field: str | None = None
    title_field: str | None = None
    url_field: str | None = None
    cleaning: Literal["none", "wikipedia"] = "none"


class Jsonl(RecordSource):
    """JSON lines, plain or compressed: one object a line."""

    kind: Literal["jsonl"] = "jsonl"


class Parquet(RecordSource):
    """Parquet files."""

    kind: Literal["parquet"] = "parquet"


class HuggingFace(RecordSource):
    """A dataset of the hub (its name) or of a local folder; `config` is its configuration."""

    kind: Literal["huggingface"] = "huggingface"
    config: str | None = None
    split: str = "train"
    revision: str | None = None


def jsonl_pieces(source: Jsonl, limit: int) -> list[Piece]:
    """Return the .jsonl files, plain ones in ranges of bytes; CorpusError if there are none."""
    ends = ("", ".gz", ".bz2", ".zst")
    kinds = tuple(kind + end for kind in ("*.jsonl", "*.ndjson", "*.json") for end in ends)
    return [piece for file in whole(source.path, kinds) for piece in cut(file, limit)]


def read_jsonl(source: Jsonl, piece: Piece) -> Iterator[Document | Rejected]:
    """Yield the records that begin in a piece; CorpusError if a compressed file is cut short."""
    name = relative_name(source.path, piece.path)
    for offset, line in lines(piece.path, piece.start, piece.end):
        where = f"{name}@{offset}"
        if line is None:
            yield Rejected(where, "too long", LONG_LINE)
        elif line.strip():
            yield _parsed(source, line, where)


def parquet_pieces(source: Parquet, limit: int) -> list[Piece]:
    """Row groups of about `limit` decompressed bytes together; CorpusError if there are no files.

    Reads the footers alone.
    """
    found = []
    for file in whole(source.path, ("*.parquet",)):
        with opened(file.path, seekable=True) as stored:
            metadata = _parquet(source, file.path, stored).metadata
            groups = [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
        start, size = 0, 0
        for number, group in enumerate(groups):
            if size and size + group > limit:
                found.append(Piece(file.path, start, number, size))
                start, size = number, 0
            size += group
        found.append(Piece(file.path, start, len(groups), size))
    return found


def read_parquet(source: Parquet, piece: Piece) -> Iterator[Document | Rejected]:
    """Yield the records of row groups; CorpusError if the file is damaged or a column is missing.

    Takes up to 400 MB beyond a few documents: a row group with a page above 128 MiB is rejected.
    """
    name = relative_name(source.path, piece.path)
    with opened(piece.path, seekable=True) as stored:
        file = _parquet(source, piece.path, stored)
        sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        groups = range(piece.start, len(sizes) if piece.end is None else piece.end)
        records = (r for group in groups for r in _group(stored, file, group, _columns(source)))
        for number, record in _numbered(records, piece.path, sum(sizes[: piece.start])):
            yield _record(source, record, f"{name}#{number}")


def _parquet(source: Parquet, path: str, stored: BinaryIO) -> ParquetFile:
    import pyarrow
    from pyarrow import parquet

    try:
        # Not buffered, a column of a row group would be read at once, however long.
        file = parquet.ParquetFile(
            stored, buffer_size=1 << 20, pre_buffer=False, page_checksum_verification=True
        )
        names = file.schema_arrow.names
    except (pyarrow.ArrowException, OSError) as error:
        raise CorpusError(
            f"{shown(path)}: unreadable ({_line(error)}); download it again"
        ) from None
    if missing := [column for column in _columns(source) if column not in names]:
        raise CorpusError(f"{shown(path)}: no column {missing[0]!r}; it has {', '.join(names)}")
    return file


def _columns(source: RecordSource) -> list[str]:
    wanted = [source.text_field, source.id_field, source.title_field, source.url_field]
    return [column for column in dict.fromkeys(wanted) if column is not None]


def _group(stored: BinaryIO, file: ParquetFile, group: int, columns: list[str]) -> Iterator[Record]:
    page = largest_page(stored, file.metadata, group, columns)
    if page > _PAGE_LIMIT:
        detail = f"in a row group with a page of {page} bytes; write smaller row groups"
        for _ in range(file.metadata.row_group(group).num_rows):
            yield Rejected("", "too long", detail)
        return
    rows = min(256, max(1, _BATCH // max(page, 1)))
    for batch in file.iter_batches(rows, [group], columns, use_threads=False):
        yield from _records(batch)


def _records(batch: RecordBatch) -> Iterator[Record]:
    import pyarrow

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
            return
    for number in range(len(batch)):
        row = batch.slice(number, 1)
        if row.nbytes > LINE_LIMIT:
            yield Rejected("", "too long", f"a record of {row.nbytes} bytes")
            continue
        try:
            record = row.to_pylist()[0]
        except UnicodeDecodeError as error:
            yield Rejected("", "not utf-8", f"{error.reason} at byte {error.start} of it")
        else:
            yield record


def _numbered(records: Iterator[Record], path: str, before: int) -> Iterator[tuple[int, Record]]:
    number = before
    while True:
        # Everything that a file, a store or a download may raise; the readers raise none of it.
        try:
            record = next(records, None)
        except Exception as error:
            raise CorpusError(
                f"{shown(path)}: unreadable after {number} records ({_line(error)}); download it "
                "again"
            ) from None
        if record is None:
            return
        number += 1
        yield number, record


def huggingface_pieces(source: HuggingFace, limit: int) -> list[Piece]:
    """Return the dataset itself, as one piece: a local folder, or a commit of a dataset of the
    hub."""
    local = os.path.exists(source.path)
    return [Piece(source.path, kind="dataset", commit="" if local else _commit(source))]


def _commit(source: HuggingFace) -> str:
    import datasets
    import huggingface_hub

    if re.fullmatch("[0-9a-f]{40}", source.revision or ""):
        return str(source.revision)
    try:
        if datasets.config.HF_HUB_OFFLINE:
            name, revision = source.path, source.revision
            commit = datasets.load_dataset_builder(name, source.config, revision=revision).hash
        else:
            api = huggingface_hub.HfApi()
            commit = api.dataset_info(source.path, revision=source.revision, timeout=10).sha
        if not re.fullmatch("[0-9a-f]{40}", str(commit)):
            # `datasets` takes text, csv and the like for a reader of the working directory.
            raise CorpusError("no dataset of the hub")
        return str(commit)
    except Exception as error:
        raise CorpusError(
            f"{source.path}: cannot load this dataset ({_line(error)}); check path and network, "
            "or set `revision` to a commit, which needs no network to be compared"
        ) from error


def dataset_name(piece: Piece) -> str:
    """Return the name of a dataset of the hub, or of the folder of a local one: the stem of ids."""
    return piece.path if piece.commit else PurePath(piece.path).name


def dataset_files(piece: Piece) -> Iterator[str]:
    """Yield all files of a local dataset, behind links, too, but for what git and the hub keep
    there."""
    seen = set()
    for folder, folders, names in os.walk(piece.path, followlinks=True):
        seen.add(os.path.realpath(folder))
        folders[:] = [
            name
            for name in folders
            if name not in (".git", ".cache")
            and os.path.realpath(os.path.join(folder, name)) not in seen  # a link that leads back
        ]
        for path in (os.path.join(folder, name) for name in names):
            if not os.path.exists(path):
                raise CorpusError(f"{path}: a link to a missing file; fetch it, or remove the link")
            yield path


def read_huggingface(source: HuggingFace, piece: Piece) -> Iterator[Document | Rejected]:
    """Yield the records of one split, streamed; CorpusError if it cannot be had."""
    path, stem = piece.path, dataset_name(piece)
    for number, record in _numbered(_dataset(source, piece), path, 0):
        fields = () if isinstance(record, Rejected) else tuple(record)
        if number == 1 and source.text_field not in fields:
            raise CorpusError(f"{path}: no field {source.text_field!r}; it has {', '.join(fields)}")
        yield _record(source, record, f"{stem}#{number}")


def _dataset(source: HuggingFace, piece: Piece) -> Iterator[Record]:
    import datasets
    import huggingface_hub

    # What is no path to `datasets` may be a name to it: of the hub, or of a format.
    path = piece.path if piece.commit else os.path.abspath(piece.path)
    try:
        if not piece.commit:
            if os.path.exists(os.path.join(path, "dataset_dict.json")):
                return iter(datasets.load_from_disk(path)[source.split])
            if os.path.exists(os.path.join(path, "state.json")):
                return iter(datasets.load_from_disk(path))
        elif not datasets.config.HF_HUB_OFFLINE:
            # Without a network `datasets` tries for half a minute, noisily; this fails at once.
            huggingface_hub.HfApi().dataset_info(path, revision=piece.commit, timeout=10)
        revision = piece.commit or None
        builder = datasets.load_dataset_builder(path, source.config, revision=revision)
        # It takes any commit from its cache when it cannot have the one that was named.
        if piece.commit and builder.hash != piece.commit:
            raise ValueError(f"got commit {builder.hash} instead of {piece.commit}")
        return iter(builder.as_streaming_dataset(split=source.split))
    except Exception as error:
        raise CorpusError(
            f"{piece.path}: cannot load this dataset ({_line(error)}); check path, config, split "
            "and network"
        ) from error


def _parsed(source: Jsonl, line: bytes, where: str) -> Document | Rejected:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return Rejected(where, "not utf-8", f"{error.reason} at byte {error.start} of the line")
    except (ValueError, RecursionError) as error:
        return Rejected(where, "malformed json", _line(error))
    if not isinstance(record, dict):
        return Rejected(where, "malformed json", f"no object but a {type(record).__name__}")
    return _record(source, record, where)


def _record(source: RecordSource, record: Record, where: str) -> Document | Rejected:
    if isinstance(record, Rejected):
        return replace(record, where=where)
    text = record.get(source.text_field)
    if not isinstance(text, str):
        problem = "has no" if text is None else f"has a {type(text).__name__} as"
        return Rejected(where, "no text", f"{problem} {source.text_field!r}")
    values = [
        str(record.get(key) if record.get(key) is not None else "") if key else ""
        for key in (source.id_field, source.title_field, source.url_field)
    ]
    # Valid JSON can spell half a surrogate pair, which neither tokenizers nor Arrow can encode.
    try:
        for value in (text, *values):
            value.encode()
    except UnicodeEncodeError:
        return Rejected(where, "lone surrogate")
    if max(map(len, values)) > _METADATA_LIMIT:
        return Rejected(where, "too long", f"id, title or link above {_METADATA_LIMIT} characters")
    if source.cleaning == "wikipedia":
        text = repaired(text)
    if not text.strip():
        return Rejected(where, "empty")
    return Document(text, values[0] or where, values[1], values[2])


def _line(error: BaseException) -> str:
    return shown(str(error))[:200] or type(error).__name__
