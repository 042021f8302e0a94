"""Find documents that contain an evaluation file's text: overlap in 13-grams.

After Brown et al., "Language Models are Few-Shot Learners" (2020), appendix C: a run of 13 words
that also occurs in an evaluation example, ignoring case, punctuation and spacing.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as as_safetensors

from data_prep import CorpusError
from data_prep.disk import write_file
from data_prep.duplicates import minhash
from data_prep.duplicates.minhash import Words, ngrams, word_hashes
from data_prep.sources.files import file_chunks
from data_prep.text.cleaning import clean

NGRAM = 13
LIMIT = 1 << 28  # bytes of one evaluation file, decompressed
ALGORITHM = f"{minhash.WORDS}, {NGRAM}-grams 1"
_SUFFIXES = (".tsv", ".csv", ".json", ".jsonl", ".txt")
_SLICE = 1 << 16  # words looked up at once: temporary arrays stay in the cache


@dataclass(frozen=True)
class Contamination:
    """Hold all 13-grams of some evaluation files.

    `hashes` [ngrams] are sorted and unique, `files` [ngrams] is the number of the first file with
    each. Per file: `names`, relative to their common folder, and how many texts it holds
    (`num_texts`: fields of two words or more) and how many of these are too short to be found
    (`num_short`: fewer than 13 words).
    """

    names: tuple[str, ...]
    num_texts: tuple[int, ...]
    num_short: tuple[int, ...]
    hashes: npt.NDArray[np.uint64]
    files: npt.NDArray[np.uint32]

    def overlap(self, words: Words) -> tuple[int, tuple[str, ...]]:
        """Return the number of a document's 13-grams that occur in the files, and these files'
        names.

        `words` are the document's `minhash.word_hashes`.
        """
        count = 0
        found: set[int] = set()
        marks, shift = self._filter
        for start in range(0, len(words) - NGRAM + 1, _SLICE):
            hashes = ngrams(words[start : start + _SLICE + NGRAM - 1], NGRAM)
            # The bitmap is False for most that are not there: a search costs 100 times as much.
            near = marks[(hashes >> shift).view(np.int64)]
            suspects = hashes[(near >> (hashes.astype(np.uint8) & np.uint8(7)) & 1).view(bool)]
            if len(suspects):
                places = np.searchsorted(self.hashes, suspects)
                places = np.minimum(places, len(self.hashes) - 1)
                places = places[self.hashes[places] == suspects]
                count += len(places)
                found.update(self.files[places].tolist())
        return count, tuple(self.names[file] for file in sorted(found))

    @cached_property
    def _filter(self) -> tuple[npt.NDArray[np.uint8], np.uint64]:
        """Build a bitmap: the first bits of a hash choose a byte, the last three its bit.

        At most 1 in 32 bits is set, until there are 16M hashes. The second value shifts a hash to
        its first bits.
        """
        shift = np.uint64(64 - min(26, len(self.hashes).bit_length() + 2))
        marks = np.zeros(1 << 64 - int(shift), dtype=np.uint8)
        lowest = self.hashes.astype(np.uint8) & np.uint8(7)
        bits = np.left_shift(1, lowest, dtype=np.uint8)
        np.bitwise_or.at(marks, (self.hashes >> shift).view(np.int64), bits)
        return marks, shift


def build(files: Sequence[Path]) -> Contamination:
    """Return the 13-grams of evaluation files; CorpusError names a file without any."""
    assert files
    hashes: list[Words] = []
    texts, short = [0] * len(files), [0] * len(files)
    for number, file in enumerate(files):
        of_file = [np.empty(0, dtype=np.uint64)]
        for field in read_examples(file):
            words = word_hashes(clean(field))
            texts[number] += len(words) >= 2
            short[number] += 2 <= len(words) < NGRAM
            of_file.append(ngrams(words, NGRAM))
        hashes.append(np.unique(np.concatenate(of_file)))
        if not len(hashes[-1]):
            raise CorpusError(
                f"{file}: no text of {NGRAM} words or more, so nothing could be found: "
                "take it out of `decontaminate.files`"
            )
    unique, firsts = np.unique(np.concatenate(hashes), return_index=True)
    file_of = np.repeat(np.arange(len(files), dtype=np.uint32), [len(part) for part in hashes])
    # GLUE's files are all called dev.tsv: names are relative to the folder that the files share.
    absolute = [os.path.abspath(file) for file in files]
    folder = os.path.commonpath([os.path.dirname(file) for file in absolute])
    names = tuple(Path(os.path.relpath(file, folder)).as_posix() for file in absolute)
    return Contamination(names, tuple(texts), tuple(short), unique, file_of[firsts])


def save(contamination: Contamination, path: Path) -> None:
    """Write a safetensors file, whole or not at all; equal contents give equal bytes."""
    about = {
        "algorithm": ALGORITHM,
        "names": contamination.names,
        "num_texts": contamination.num_texts,
        "num_short": contamination.num_short,
    }
    # One key: safetensors writes several in any order.
    data = as_safetensors(
        {"hashes": contamination.hashes, "files": contamination.files},
        metadata={"contamination": json.dumps(about)},
    )
    write_file(path, lambda file: file.write(data))


def load(path: Path) -> Contamination:
    """Load an index that `save` wrote; CorpusError if it is damaged or of another version."""
    try:
        with safe_open(path, framework="numpy") as file:
            about = json.loads(file.metadata()["contamination"])
            hashes, files = file.get_tensor("hashes"), file.get_tensor("files")
        names, texts, short = (tuple(about[key]) for key in ("names", "num_texts", "num_short"))
        same = about["algorithm"] == ALGORITHM
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CorpusError(f"{path}: no index of evaluation files ({error}): delete it") from error
    if not same:
        raise CorpusError(f"{path}: written by another version of this code: delete it")
    return Contamination(names, texts, short, hashes, files)


def read_examples(path: Path) -> Iterator[str]:
    """Yield the text fields of an evaluation file, plain or compressed (.gz, .bz2, .zst).

    .tsv and .csv: every field; .json and .jsonl: every string in a value, at any depth; .txt: every
    line. A tab in a .csv file's first line makes it a .tsv file (as in STS-B). Raises CorpusError
    if the file is missing, damaged, empty, larger than LIMIT, not UTF-8 or not what its name says.
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
            waiting: list[Any] = []
            whole: ValueError | None = None
            if suffix == ".json":
                try:
                    waiting.append(json.loads(text))
                    text = ""
                except ValueError as error:
                    if "\n" not in text.strip():
                        raise
                    whole = error  # JSON lines are often named .json: raise this if they are none
            for number, line in enumerate(text.split("\n"), start=1):
                if line.strip():
                    try:
                        waiting.append(json.loads(line))
                    except ValueError as error:
                        raise whole or ValueError(f"line {number}: {error}") from None
                while waiting:
                    value = waiting.pop()
                    if isinstance(value, str):
                        yield value
                    elif isinstance(value, dict | list):
                        inner = value.values() if isinstance(value, dict) else value
                        waiting.extend(reversed(inner))
        elif suffix == ".csv" and "\t" not in text.partition("\n")[0]:
            limit = csv.field_size_limit(LIMIT)  # a quote that is never closed makes one long field
            try:
                rows = list(csv.reader(io.StringIO(text, newline="")))
            finally:
                csv.field_size_limit(limit)
            yield from chain.from_iterable(rows)
        else:
            for line in text.split("\n"):
                line = line.removesuffix("\r")
                # Not the csv module: a quotation mark in GLUE's files is a plain character.
                yield from [line] if suffix == ".txt" else line.split("\t")
    except (csv.Error, RecursionError, ValueError) as error:
        raise CorpusError(f"{path}: not a {suffix} file ({error}): fix or rename it") from error
