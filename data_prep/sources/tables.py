"""Texts in records: JSON lines, parquet, and datasets of the Hugging Face hub."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any, Literal

from data_prep import CorpusError
from data_prep.sources.document import Document, FileSource, Rejected
from data_prep.sources.files import lines, list_files, relative_name

_SURROGATE = re.compile("[\\ud800-\\udfff]")


class RecordSource(FileSource):
    """The names of the fields (columns) to read; without `id_field`, ids are record numbers."""

    text_field: str = "text"
    id_field: str | None = None
    title_field: str | None = None
    url_field: str | None = None


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


def jsonl_inputs(source: Jsonl) -> list[str]:
    """The .jsonl files; CorpusError if there are none."""
    kinds = ("*.jsonl", "*.ndjson", "*.json")
    return list_files(source.path, tuple(k + end for k in kinds for end in ("", ".gz", ".zst")))


def read_jsonl(source: Jsonl, input: str) -> Iterator[Document | Rejected]:
    """The records of one file; CorpusError if a compressed file is cut short."""
    name = relative_name(source.path, input)
    for number, line in lines(input):
        where = f"{name}#{number}"
        if line is None:
            yield Rejected(where, "too long", "a line of more than 64 MiB")
        elif line.strip():
            yield _parsed(source, line, where)


def parquet_inputs(source: Parquet) -> list[str]:
    """The parquet files; CorpusError if there are none."""
    return list_files(source.path, ("*.parquet",))


def read_parquet(source: Parquet, input: str) -> Iterator[Document | Rejected]:
    """The records of one file, batch by batch; CorpusError if damaged or a column is missing."""
    import pyarrow
    from pyarrow import parquet

    name = relative_name(source.path, input)
    wanted = [source.text_field, source.id_field, source.title_field, source.url_field]
    columns = [column for column in dict.fromkeys(wanted) if column is not None]
    number = 0
    try:
        with parquet.ParquetFile(input) as file:
            names = file.schema_arrow.names
            if missing := [column for column in columns if column not in names]:
                raise CorpusError(f"{input}: no column {missing[0]!r}; it has {', '.join(names)}")
            for batch in file.iter_batches(batch_size=256, columns=columns):
                for record in batch.to_pylist():
                    number += 1
                    yield _record(source, record, f"{name}#{number}")
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise CorpusError(
            f"{input}: unreadable after {number} records ({_line(error)}); download it again"
        ) from error


def huggingface_inputs(source: HuggingFace) -> list[str]:
    """The dataset itself, as one input."""
    return [source.path]


def read_huggingface(source: HuggingFace, input: str) -> Iterator[Document | Rejected]:
    """The records of one split, streamed; CorpusError if it cannot be had."""
    stem = PurePath(input).name if os.path.exists(input) else input
    number = 0
    # Everything that a download or a remote file may raise; the reader itself raises none of it.
    records = _dataset(source, input)
    while True:
        try:
            record = next(records, None)
        except Exception as error:
            raise CorpusError(f"{input}: failed after {number} records: {_line(error)}") from error
        if record is None:
            return
        if number == 0 and source.text_field not in record:
            raise CorpusError(
                f"{input}: no field {source.text_field!r}; it has {', '.join(record)}"
            )
        number += 1
        yield _record(source, record, f"{stem}#{number}")


def _dataset(source: HuggingFace, input: str) -> Iterator[Mapping[str, Any]]:
    import datasets
    import huggingface_hub

    try:
        saved = [os.path.join(input, name) for name in ("dataset_dict.json", "state.json")]
        if os.path.exists(saved[0]):
            return iter(datasets.load_from_disk(input)[source.split])
        if os.path.exists(saved[1]):
            return iter(datasets.load_from_disk(input))
        if not os.path.exists(input) and not datasets.config.HF_HUB_OFFLINE:
            # Without a network load_dataset tries for half a minute, noisily; this fails at once.
            huggingface_hub.HfApi().dataset_info(input, revision=source.revision, timeout=10)
        return iter(
            datasets.load_dataset(
                input,
                source.config,
                split=source.split,
                revision=source.revision,
                streaming=True,
            )
        )
    except Exception as error:
        raise CorpusError(
            f"{input}: cannot load this dataset ({_line(error)}); check path, config, split and "
            "network"
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


def _record(source: RecordSource, record: Mapping[str, Any], where: str) -> Document | Rejected:
    text = record.get(source.text_field)
    if not isinstance(text, str):
        problem = "has no" if text is None else f"has a {type(text).__name__} as"
        return Rejected(where, "no text", f"{problem} {source.text_field!r}")
    values = [
        str(record.get(key) if record.get(key) is not None else "") if key else ""
        for key in (source.id_field, source.title_field, source.url_field)
    ]
    # Valid JSON can spell half a surrogate pair, which neither tokenizers nor Arrow can encode.
    if any(map(_SURROGATE.search, (text, *values))):
        return Rejected(where, "lone surrogate")
    if not text.strip():
        return Rejected(where, "empty")
    return Document(text, values[0] or where, values[1], values[2])


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
