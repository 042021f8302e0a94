"""Find documents that contain an evaluation file's text: overlap in n-grams of words.

After Brown et al., "Language Models are Few-Shot Learners" (2020), appendix C: a run of N words
that also occurs in an evaluation example, ignoring case, punctuation and spacing. N is the 5th
percentile of the examples' lengths in words, at least 8 and at most 13, for each file. An example
is a row or record; the words of its texts are joined. Unlike in the paper, a text shorter than N is
found too, as a whole, from 5 words on. Shorter texts cannot be found, and are counted.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors import safe_open
from safetensors.numpy import save as as_safetensors

from data_prep import CorpusError
from data_prep.disk import write_file
from data_prep.duplicates import minhash
from data_prep.duplicates.minhash import Words, ngrams, word_hashes
from data_prep.sources.files import file_chunks
from data_prep.text.cleaning import clean

SHORTEST, LONGEST = 8, 13  # n-grams, in words
WHOLE = 5  # words of the shortest text that is found as a whole
LIMIT = 1 << 28  # bytes of one evaluation file, decompressed
ALGORITHM = f"{minhash.WORDS}, {SHORTEST} to {LONGEST}-grams and whole texts from {WHOLE} words 2"
_SUFFIXES = (".tsv", ".csv", ".json", ".jsonl", ".txt")
_SLICE = 1 << 16  # words looked up at once: temporary arrays stay in the cache


class Index(NamedTuple):
    """Hold all runs of one length: `hashes` [runs], sorted and unique, and their first files."""

    hashes: npt.NDArray[np.uint64]
    files: npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Contamination:
    """Hold the runs of words of some evaluation files, by their length in words.

    Per file: `names`, relative to their common folder; `sizes`, the N of its n-grams; how many
    texts it holds (`num_texts`: fields of two words or more); and how many of these are too short
    to be found (`num_short`: fewer than 5 words).
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    num_texts: tuple[int, ...]
    num_short: tuple[int, ...]
    by_length: dict[int, Index]

    def overlap(self, words: Words) -> tuple[int, tuple[str, ...]]:
        """Return the number of a document's runs of words that occur in the files, and these
        files' names.

        `words` are the document's `minhash.word_hashes`.
        """
        count = 0
        found: set[int] = set()
        for length, (known, files) in self.by_length.items():
            marks, shift = self._filters[length]
            for start in range(0, len(words) - length + 1, _SLICE):
                hashes = ngrams(words[start : start + _SLICE + length - 1], length)
                # The bitmap is False for most that are not there: a search costs 100 times as much.
                near = marks[(hashes >> shift).view(np.int64)]
                suspects = hashes[(near >> (hashes.astype(np.uint8) & np.uint8(7)) & 1).view(bool)]
                if len(suspects):
                    places = np.minimum(np.searchsorted(known, suspects), len(known) - 1)
                    places = places[known[places] == suspects]
                    count += len(places)
                    found.update(files[places].tolist())
        return count, tuple(self.names[file] for file in sorted(found))

    @cached_property
    def _filters(self) -> dict[int, tuple[npt.NDArray[np.uint8], np.uint64]]:
        """Build a bitmap of each length: the first bits of a hash choose a byte, the last three its
        bit.

        At most 1 in 32 bits is set, until there are 16M hashes. The second value shifts a hash to
        its first bits.
        """
        filters = {}
        for length, (hashes, _) in self.by_length.items():
            shift = np.uint64(64 - min(26, len(hashes).bit_length() + 2))
            marks = np.zeros(1 << 64 - int(shift), dtype=np.uint8)
            lowest = hashes.astype(np.uint8) & np.uint8(7)
            bits = np.left_shift(1, lowest, dtype=np.uint8)
            np.bitwise_or.at(marks, (hashes >> shift).view(np.int64), bits)
            filters[length] = (marks, shift)
        return filters


def build(files: Sequence[Path]) -> Contamination:
    """Return the runs of words of evaluation files; CorpusError names a file without any."""
    assert files
    sizes, texts, short = [], [0] * len(files), [0] * len(files)
    runs: dict[int, list[tuple[int, Words]]] = {}  # by length: (number of the file, hashes)
    for number, file in enumerate(files):
        examples: list[Words] = []
        wholes: list[Words] = []
        for fields in read_examples(file):
            found = [words for words in map(_words, fields) if len(words)]
            texts[number] += len(found)
            short[number] += sum(len(words) < WHOLE for words in found)
            wholes += [words for words in found if len(words) >= WHOLE]
            if found:
                examples.append(np.concatenate(found))
        lengths = sorted(map(len, examples)) or [LONGEST]
        percentile = lengths[len(lengths) * 5 // 100]
        sizes.append(min(max(percentile, SHORTEST), LONGEST))
        parts: dict[int, list[Words]] = {}
        for words in examples:
            parts.setdefault(sizes[-1], []).append(ngrams(words, sizes[-1]))
        for words in wholes:
            if len(words) < sizes[-1]:
                parts.setdefault(len(words), []).append(ngrams(words, len(words)))
        hashes = {length: np.unique(np.concatenate(of_one)) for length, of_one in parts.items()}
        if not any(map(len, hashes.values())):
            raise CorpusError(
                f"{file}: no text of {WHOLE} words or more, so nothing could be found: "
                "take it out of `decontaminate.files`"
            )
        for length, of_one in hashes.items():
            if len(of_one):
                runs.setdefault(length, []).append((number, of_one))
    by_length = {}
    for length, of_length in sorted(runs.items()):
        unique, firsts = np.unique(np.concatenate([h for _, h in of_length]), return_index=True)
        numbers = np.array([number for number, _ in of_length], dtype=np.uint32)
        file_of = np.repeat(numbers, [len(h) for _, h in of_length])
        by_length[length] = Index(unique, file_of[firsts])
    # GLUE's files are all called dev.tsv: names are relative to the folder that the files share.
    absolute = [os.path.abspath(file) for file in files]
    folder = os.path.commonpath([os.path.dirname(file) for file in absolute])
    names = tuple(Path(os.path.relpath(file, folder)).as_posix() for file in absolute)
    return Contamination(names, tuple(sizes), tuple(texts), tuple(short), by_length)


def _words(field: str) -> Words:
    """Return the words of a field; none of labels, numbers, dates and addresses."""
    text = clean(field)
    words = word_hashes(text)
    # A field without a space counts as text only in scripts without spaces, such as Chinese.
    letters = any(character.isalpha() for character in text)
    is_text = letters and len(words) >= 2 and (" " in text or not text.isascii())
    return words if is_text else words[:0]


def save(contamination: Contamination, path: Path) -> None:
    """Write a safetensors file, whole or not at all; equal contents give equal bytes."""
    about = {
        "algorithm": ALGORITHM,
        "names": contamination.names,
        "sizes": contamination.sizes,
        "num_texts": contamination.num_texts,
        "num_short": contamination.num_short,
    }
    # One key: safetensors writes several in any order.
    tensors: dict[str, npt.NDArray[Any]] = {}
    for length, index in contamination.by_length.items():
        tensors |= {f"hashes-{length}": index.hashes, f"files-{length}": index.files}
    data = as_safetensors(tensors, metadata={"contamination": json.dumps(about)})
    write_file(path, lambda file: file.write(data))


def load(path: Path) -> Contamination:
    """Load an index that `save` wrote; its unit's record has the hash of its bytes."""
    with safe_open(path, framework="numpy") as file:
        about = json.loads(file.metadata()["contamination"])
        stored = list(file.keys())
        lengths = sorted(int(n.removeprefix("hashes-")) for n in stored if n[0] == "h")
        by_length = {
            length: Index(file.get_tensor(f"hashes-{length}"), file.get_tensor(f"files-{length}"))
            for length in lengths
        }
    keys = ("names", "sizes", "num_texts", "num_short")
    names, sizes, texts, short = (tuple(about[key]) for key in keys)
    return Contamination(names, sizes, texts, short, by_length)


def read_examples(path: Path) -> Iterator[list[str]]:
    """Yield the text fields of each example of an evaluation file, plain or compressed (.gz, .bz2,
    .zst).

    .tsv and .csv: every field of a row; .json and .jsonl: every string of a record, at any depth,
    where a record is a line or an item of a list (of another value each string is an example);
    .txt: every line. A tab in a .csv file's first line makes it a .tsv file (as in STS-B). Raises
    CorpusError if the file is missing, damaged, empty, larger than LIMIT, not UTF-8 or not what its
    name says.
    """
    name = path.name.lower()
    for compressed in (".gz", ".bz2", ".zst"):
        name = name.removesuffix(compressed)
    suffix = Path(name).suffix
    if suffix not in _SUFFIXES:
        known = ", ".join(_SUFFIXES)
        raise CorpusError(f"{path}: not a file of examples: its name must end in one of {known}")

    parts: list[bytes] = []
    size = 0
    for chunk in file_chunks(str(path)):
        parts.append(chunk)
        size += len(chunk)
        if size > LIMIT:
            raise CorpusError(f"{path}: more than {LIMIT >> 20} MiB: name the part you evaluate on")
    try:
        text = b"".join(parts).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path}: binary, or not UTF-8: convert it to UTF-8") from error
    if "\0" in text:
        raise CorpusError(f"{path}: binary, not text: name a file of text")
    if not text.strip():
        raise CorpusError(f"{path}: empty: take it out of `decontaminate.files`")

    try:
        if suffix in (".json", ".jsonl"):
            records: list[Any] = []
            whole: ValueError | None = None
            if suffix == ".json":
                try:
                    value = json.loads(text)
                    text = ""
                    # Of a list each item is an example; of an object, such as SQuAD's, each string.
                    records = value if isinstance(value, list) else [*_strings(value)]
                except ValueError as error:
                    if "\n" not in text.strip():
                        raise
                    whole = error  # JSON lines are often named .json: raise this if they are none
            yield from ([*_strings(record)] for record in records)
            for number, line in enumerate(text.split("\n"), start=1):
                if line.strip():
                    try:
                        value = json.loads(line)
                    except ValueError as error:
                        raise whole or ValueError(f"line {number}: {error}") from None
                    yield [*_strings(value)]
        elif suffix == ".csv" and "\t" not in text.partition("\n")[0]:
            limit = csv.field_size_limit(LIMIT)  # a quote that is never closed makes one long field
            try:
                rows = list(csv.reader(io.StringIO(text, newline=""), strict=True))
            except csv.Error:  # a quotation mark that is none joins rows
                rows = [[line] for line in text.splitlines()]
            finally:
                csv.field_size_limit(limit)
            yield from rows
        else:
            for line in text.split("\n"):
                line = line.removesuffix("\r")
                # Not the csv module: a quotation mark in GLUE's files is a plain character.
                yield [line] if suffix == ".txt" else line.split("\t")
    except (csv.Error, RecursionError, ValueError) as error:
        raise CorpusError(f"{path}: not a {suffix} file ({error}): fix or rename it") from error


def _strings(value: Any) -> Iterator[str]:
    """Yield every string in a JSON value, in order."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            inner = value.values() if isinstance(value, dict) else value
            waiting.extend(reversed(inner))
