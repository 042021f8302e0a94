"""Read labelled examples: CSV, TSV, JSONL, Parquet, CoNLL, SQuAD's JSON, or IMDb's folders.

Every reader yields a mapping of column names, or places, to values.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep import CorpusError
from data_prep.disk.json_files import NotRegularError, read_regular_text
from data_prep.messages import error_line
from data_prep.shards import Segments, load_manifest, open_shards
from data_prep.shards.manifest import MANIFEST

Record = Mapping[str | int, Any]
LEFT_OUT: Record = {}  # stands for a line that is left out: the others keep their numbers
_TOGETHER = 4096  # documents
_SPLITS = ("train", "validation", "test", "dev")
_LARGEST = 2**32  # bytes of a text file, which is read at once
_BROKEN = 1000  # one line of so many in a TSV may lack columns, as in GLUE's QQP
Warn = Callable[[str], None]


def read_records(path: Path, names: bool, warn: Warn) -> Iterator[Record]:
    """Yield the records of a file, or of the files of a folder in the order of their names.

    A folder holds Parquet or JSONL files, as the Hub lays them out, or a folder for each label with
    a text in each file, as IMDb does.

    Args:
        path: of a file or folder.
        names: whether a CSV or TSV begins with a line of names.
        warn: receives how many lines of a TSV were left out.

    Raises:
        CorpusError: it is missing, of no known format, or damaged; names the line.
    """
    try:
        if path.is_dir():
            yield from _of_folder(path, names, warn)
            return
        reader = _READERS.get(path.suffix.lower())
        if reader is None:
            kinds = ", ".join(_READERS)
            raise CorpusError(f"{path}: not a format of examples: rename it to one of {kinds}")
        yield from reader(path, names, warn)
    except (OSError, NotRegularError, UnicodeDecodeError, pa.ArrowException) as error:
        if isinstance(error, FileNotFoundError):
            raise CorpusError(f"{path}: no such file or folder: check the path") from None
        raise CorpusError(f"{path}: cannot be read ({error_line(error)})") from None


def read_unlabelled(path: Path, text: str | int, names: bool, warn: Warn) -> Iterator[Record]:
    """Yield records with a text each: of a file, or the whole documents of shards.

    Args:
        path: of a file or folder.
        text: the column of the task's own files.
        names, warn: see `read_records`.

    Raises:
        CorpusError: see `read_records`; or the shards keep no texts.
    """
    if not (path / MANIFEST).is_file():
        yield from read_records(path, names, warn)
        return
    if not load_manifest(path).has_texts:
        raise CorpusError(f"{path}: keeps no texts: prepare that corpus with keep_text: true")
    segments = Segments(open_shards(path))
    for begin in range(0, len(segments), _TOGETHER):
        for found in segments.texts(begin, min(begin + _TOGETHER, len(segments))):
            if found is not None:
                yield {text: found}


def files_of(path: Path) -> list[Path]:
    """Return the files that `read_records` reads of a path, in their order."""
    if not path.is_dir():
        return [path]
    # A folder of the Hub also has a README and settings.
    known = [p for p in path.rglob("*") if p.suffix.lower() in (".parquet", ".jsonl")]
    known = [p for p in known if not _is_hidden(p, path)]
    if known:
        if len(formats := {p.suffix.lower() for p in known}) > 1:
            raise CorpusError(
                f"{path}: holds {' and '.join(sorted(formats))} files, which may have the same "
                "examples: remove one of the two formats"
            )
        if len(found := {s for p in known for s in _SPLITS if s in p.name.lower()}) > 1:
            raise CorpusError(
                f"{path}: holds files of {' and '.join(sorted(found))}: give each split a folder "
                "or a file of its own"
            )
        return sorted(known)
    # IMDb's folder also has lists of addresses, and reviews without a label.
    texts = [p for p in path.glob("*/*.txt") if p.parent.name != "unsup"]
    texts = [p for p in texts if not _is_hidden(p, path)]
    return sorted(texts or (p for p in path.glob("*.txt") if not _is_hidden(p, path)))


def _is_hidden(file: Path, folder: Path) -> bool:
    """Return whether a file, or a folder on the way to it, is one that editors and tools keep."""
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def _of_folder(path: Path, names: bool, warn: Warn) -> Iterator[Record]:
    files = files_of(path)
    if not files:
        raise CorpusError(f"{path}: holds no .parquet, .jsonl or .txt file: check the path")
    if any(file.suffix.lower() != ".txt" for file in files):
        for file in files:
            if file.suffix.lower() != ".txt":
                yield from _READERS[file.suffix.lower()](file, names, warn)
        return
    for file in files:
        if file.parent == path:
            raise CorpusError(f"{file}: lies in no folder that names its label: move it into one")
        yield {"text": _text_of(file), "label": file.parent.name}


def _text_of(path: Path) -> str:
    return read_regular_text(path, _LARGEST).removeprefix("\ufeff")


def _csv(path: Path, names: bool, warn: Warn) -> Iterator[Record]:
    # A quotation mark in a TSV of GLUE is a character as any other.
    tabs = path.suffix.lower() == ".tsv"
    csv.field_size_limit(sys.maxsize)
    with path.open(encoding="utf-8-sig", newline="") as lines:
        if not tabs:
            tabs = "\t" in lines.readline()
            lines.seek(0)
        # Strict, so that a quotation mark that is never closed does not swallow the rest.
        reader = (
            csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
            if tabs
            else csv.reader(lines, strict=True)
        )
        begun = 1  # the line where a row begins
        try:
            head = next(reader, []) if names else []
            if len(set(head)) < len(head):
                raise CorpusError(f"{path}: two columns have the same name: give each its own")
            short, rows, begun, long = [], 0, reader.line_num + 1, list[int]()
            for row in reader:
                long += [begun] * (reader.line_num > begun)
                begun = reader.line_num + 1
                if not row:
                    continue
                rows += 1
                if names and tabs and len(row) < len(head):
                    short.append(reader.line_num)
                    yield LEFT_OUT
                    continue
                if names and len(row) != len(head):
                    fix = "remove tabs from texts" if tabs else "put texts with commas in quotes"
                    raise CorpusError(
                        f"{path}: line {reader.line_num} has {len(row)} columns, and the first "
                        f"line names {len(head)}: {fix}"
                    )
                yield dict(zip(head, row, strict=False)) if names else dict(enumerate(row))
            if len(short) > rows / _BROKEN:
                raise CorpusError(
                    f"{path}: {len(short):,} of {rows:,} lines have fewer columns than the first "
                    f"line names, such as line {short[0]}: correct them"
                )
            if long:
                warn(
                    f"{path}: {len(long):,} of {rows:,} rows have several lines, the first from "
                    f"line {long[0]} on: if no text should, quotation marks there join rows"
                )
            if short:
                warn(
                    f"{path}: {len(short):,} of {rows:,} lines are left out: they have fewer "
                    f"columns than the first line names, such as line {short[0]}"
                )
        except csv.Error as error:
            raise CorpusError(
                f"{path}: the row that begins in line {begun}: {error_line(error)}: correct its "
                "quotation marks"
            ) from None


def _jsonl(path: Path, names: bool, warn: Warn) -> Iterator[Record]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if not isinstance(record, dict):
                raise CorpusError(f"{path}: line {number} is not a JSON object")
            yield record


def _parquet(path: Path, names: bool, warn: Warn) -> Iterator[Record]:
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(use_threads=False):
            yield from batch.to_pylist()


def _conll(path: Path, names: bool, warn: Warn) -> Iterator[Record]:
    """Yield sentences: a word in the first column of a line, its tag in the last."""
    words: list[str] = []
    tags: list[str] = []
    text = _text_of(path)
    for number, line in enumerate([*text.split("\n"), ""], start=1):
        parts = line.rstrip("\r").split("\t") if "\t" in line else line.split(" ")
        parts = [part for part in parts if part.strip()]
        if not parts or parts[0] == "-DOCSTART-":
            if words:
                yield {"tokens": words, "tags": tags}
            words, tags = [], []
        elif re.match(r"# (\w+ = |(id|newdoc|newpar)\b)", line) and not words:
            continue  # a comment of CoNLL-U or MultiCoNER
        elif len(parts) < 2:
            raise CorpusError(f"{path}: line {number} has no tag: a line is a word and its tag")
        else:
            words.append(parts[0])
            tags.append(parts[-1])


def _squad(path: Path, names: bool, warn: Warn) -> Iterator[Record]:
    """Yield the questions of SQuAD's JSON; one without an answer has none."""
    try:
        for article in json.loads(_text_of(path))["data"]:
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    yield {
                        "id": question["id"],
                        "question": question["question"],
                        "context": paragraph["context"],
                        "answers": question.get("answers"),
                    }
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorpusError(
            f"{path}: not SQuAD's JSON ({error_line(error)}): data, paragraphs, qas; a file with "
            "an object a line ends in .jsonl"
        ) from None


_READERS = {
    ".csv": _csv,
    ".tsv": _csv,
    ".jsonl": _jsonl,
    ".parquet": _parquet,
    ".conll": _conll,
    ".bio": _conll,
    ".json": _squad,
}
