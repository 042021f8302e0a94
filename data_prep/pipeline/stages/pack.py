"""Tokenise and pack kept documents into one shard and its side table for each row length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.pipeline.packing import fill_rows, pack, split_at_lines, split_tokens
from data_prep.pipeline.stages.columns import batch
from data_prep.pipeline.stages.deduplicate import TRAIN, VALIDATION, fates_file
from data_prep.pipeline.stages.documents import read_part
from data_prep.pipeline.units import Planned, Stage, group
from data_prep.shards import write_shard, write_texts
from data_prep.sources import Document
from data_prep.tokens import Tokens, load
from data_prep.tokens.tokenizer import NO_WORD_PIECE

if TYPE_CHECKING:
    from data_prep.pipeline.plan import Plan

Item = TypeVar("Item")
# Best fit wants many segments to choose from; ids of a window take 8 MB.
WINDOW_TOKENS = 2_000_000
BATCH_CHARACTERS = 1_000_000
SAMPLE_CHARACTERS = 100_000  # a fast tokenizer must prove itself on so much of each unit
SEGMENTS = pa.schema(
    {
        "row": pa.int32(),
        "start": pa.int16(),
        "source": pa.int16(),
        "document": pa.string(),
        "title": pa.string(),
        "url": pa.string(),
    }
)


@dataclass(frozen=True, slots=True)
class PartSlice:
    """Hold a part of a unit of extraction, with documents `first` to `last` of the unit.

    `by_line` cuts its documents at line ends only.
    """

    file: Path
    source_number: int
    by_line: bool
    fates: Path
    taken_out: Path
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class PackTask:
    """Hold the documents that become one shard of each length."""

    split: Literal["train", "validation"]
    slices: tuple[PartSlice, ...]
    tokenizer: Path
    row_lengths: tuple[int, ...]
    keep_text: bool


@dataclass(frozen=True, slots=True)
class _Tokenised:
    lines: list[npt.NDArray[np.int32]]  # one unless it is cut at line ends only
    source_number: int
    document: Document  # without its text, unless texts are kept


def _plan(plan: Plan) -> Iterator[Planned]:
    """Join parts until they hold `part_bytes` of a split, so that few rows end half empty."""
    (deduplicated,), (fates_folder,) = plan.records("deduplicate"), plan.folders("deduplicate")
    (tokenizer,), (vocabulary,) = plan.records("vocabulary"), plan.folders("vocabulary")
    sha256 = {output.file: output.sha256 for output in deduplicated.outputs}
    # (part, its bytes of each split, digests of what it is read from), in document order
    slices: list[tuple[PartSlice, list[int], tuple[str, ...]]] = []
    extracted = zip(plan.records("extract"), plan.folders("extract"), strict=True)
    for unit, (record, folder) in enumerate(extracted):
        source = plan.config.sources[record.result["source"]]
        fates = fates_file(fates_folder, unit)
        taken_out = fates.with_name(f"{unit:06d}-paragraphs.npy")
        files = (f"file {file.name}: {sha256[file.name]}" for file in (fates, taken_out))
        upstream = (f"unit extract/{unit}: {record.digest}", *files)
        last = 0
        sizes = deduplicated.result["units"][unit]["parts"]
        for number, part in enumerate(record.result["parts"]):
            first, last = last, last + part["documents"]
            part_slice = PartSlice(
                file=folder / part["file"],
                source_number=record.result["source"],
                by_line=source.by_line,
                fates=fates,
                taken_out=taken_out,
                first=first,
                last=last,
            )
            slices.append((part_slice, [of_split[number] for of_split in sizes], upstream))
    splits: tuple[tuple[Literal["train", "validation"], int], ...] = (
        ("train", TRAIN),
        ("validation", VALIDATION),
    )
    for split, number in splits:
        chosen = [item for item in slices if item[1][number]]
        for members in group([sizes[number] for _, sizes, _ in chosen], plan.part_bytes):
            mine = [chosen[member] for member in members]
            task = PackTask(
                split=split,
                slices=tuple(part for part, _, _ in mine),
                tokenizer=vocabulary,
                row_lengths=plan.config.row_lengths,
                keep_text=plan.config.keep_text,
            )
            keys = {
                "split": split,
                "parts": [
                    [part.file.name, part.source_number, part.by_line, part.first, part.last]
                    for part in task.slices
                ],
                "row_lengths": plan.config.row_lengths,
                **({"keep_text": True} if task.keep_text else {}),
            }
            digests = [digest for _, _, of_part in mine for digest in of_part]
            upstream = tuple(dict.fromkeys([f"unit vocabulary/0: {tokenizer.digest}", *digests]))
            yield Planned(task, keys, upstream)


def pack_unit(task: PackTask, folder: Path) -> dict[str, Any]:
    """Write `LENGTH/shard.arrow`, segments.parquet and counts.npy for each row length.

    If texts are kept, texts.arrow as well.
    """
    tokens = load(task.tokenizer, agrees=False)  # what `Tokens.save` writes is read as it is
    tokens.origin = "the tokenizer of the corpus"  # not the copy of it that is read here
    sample: list[str] = []
    size = 0
    for document in chain.from_iterable(_kept(part, task.split) for part in task.slices):
        sample.append(document.text[: SAMPLE_CHARACTERS - size])
        size += len(sample[-1])
        if size >= SAMPLE_CHARACTERS:
            break
    slow = tokens.accelerate(sample)
    without_tokens: Counter[int] = Counter()
    characters: Counter[int] = Counter()
    rows = [_Rows(length, tokens, task.keep_text) for length in task.row_lengths]
    found = _documents(task, tokens, without_tokens, characters)
    sized = ((sum(map(len, item.lines)) + 2, item) for item in found)
    for window in _until(sized, WINDOW_TOKENS):
        for length in rows:
            length.add(window)
    shards = {}
    for length in rows:
        if length.filled:
            shards[str(length.row_length)] = length.write(folder / str(length.row_length))
    return {
        "split": task.split,
        "shards": shards,
        "without_tokens": {str(source): count for source, count in without_tokens.items()},
        "characters": {str(source): count for source, count in characters.items()},
        "slow": "" if slow == NO_WORD_PIECE else slow,
    }


class _Rows:
    """Collect the rows of one length."""

    def __init__(self, row_length: int, tokens: Tokens, keep_text: bool) -> None:
        self.row_length = row_length
        self.filled: list[npt.NDArray[Any]] = []
        self._tokens = tokens
        self._dtype = "uint16" if len(tokens.vocabulary) <= 2**16 else "uint32"
        self._num_rows = 0
        self._columns: dict[str, list[Any]] = {name: [] for name in SEGMENTS.names}
        self._texts: list[str | None] | None = [] if keep_text else None

    def add(self, window: Sequence[_Tokenised]) -> None:
        """Split documents into segments that fit, and pack these."""
        limit = self.row_length - 2
        segments: list[npt.NDArray[np.int32]] = []
        owners: list[_Tokenised] = []
        texts: list[str | None] = []
        for item in window:
            several = len(item.lines) > 1
            found = (
                split_at_lines(item.lines, limit) if several else split_tokens(item.lines[0], limit)
            )
            segments += found
            owners += [item] * len(found)
            texts += [item.document.text] if len(found) == 1 else [None] * len(found)
        special = self._tokens.special_ids
        rows, places = fill_rows(
            segments,
            pack([len(segment) + 2 for segment in segments], self.row_length),
            self.row_length,
            cls=special.cls,
            sep=special.sep,
            pad=special.pad,
            dtype=self._dtype,
        )
        columns = self._columns
        columns["row"] += (places[:, 0] + self._num_rows).tolist()
        columns["start"] += places[:, 1].tolist()
        for number in places[:, 2].tolist():
            owner = owners[number]
            columns["source"].append(owner.source_number)
            columns["document"].append(owner.document.id)
            columns["title"].append(owner.document.title)
            columns["url"].append(owner.document.url)
        if self._texts is not None:
            self._texts += [texts[number] for number in places[:, 2].tolist()]
        self.filled.append(rows)
        self._num_rows += len(rows)

    def write(self, folder: Path) -> dict[str, Any]:
        """Write the shard, its side table and how often each id occurs in it."""
        folder.mkdir()
        ids = np.empty((self._num_rows, self.row_length), dtype=self._dtype)
        while self.filled:  # each is freed as it is copied
            rows = self.filled.pop()
            ids[self._num_rows - len(rows) : self._num_rows] = rows
            self._num_rows -= len(rows)
        special, size = self._tokens.special_ids, len(self._tokens.vocabulary)
        # How often each id occurs. bincount takes eight bytes an id, so a few rows at a time.
        counts = np.zeros(size, dtype=np.int64)
        for start in range(0, len(ids), 1024):
            counts += np.bincount(ids[start : start + 1024].reshape(-1), minlength=size)
        np.save(folder / "counts.npy", counts)
        shard = write_shard(folder / "shard.arrow", ids, pad=special.pad)
        table = pa.Table.from_batches([batch(self._columns.values(), SEGMENTS)])
        pq.write_table(
            table, folder / "segments.parquet", compression="zstd", write_page_checksum=True
        )
        if self._texts is not None:
            write_texts(folder / "texts.arrow", self._columns["row"], self._texts)
        return {"shard": shard.model_dump(mode="json"), "segments": len(table)}


def _until(items: Iterable[tuple[int, Item]], limit: int) -> Iterator[list[Item]]:
    """Yield lists of consecutive items of (size, item); the last one brings the sum to `limit`."""
    held: list[Item] = []
    total = 0
    for size, item in items:
        held.append(item)
        total += size
        if total >= limit:
            yield held
            held, total = [], 0
    if held:
        yield held


def _documents(
    task: PackTask, tokens: Tokens, without_tokens: Counter[int], characters: Counter[int]
) -> Iterator[_Tokenised]:
    """Yield the documents as ids; those without any and the characters of the others are
    counted."""
    for part in task.slices:
        kept = ((len(document.text), document) for document in _kept(part, task.split))
        for documents in _until(kept, BATCH_CHARACTERS):
            texts = [doc.text.split("\n") if part.by_line else [doc.text] for doc in documents]
            encoded = iter(tokens.encode_batch(list(chain.from_iterable(texts))))
            for document, lines in zip(documents, texts, strict=True):
                ids = [next(encoded) for _ in lines]
                if not any(len(line) for line in ids):
                    without_tokens[part.source_number] += 1
                    continue
                characters[part.source_number] += len(document.text)
                # Only what the side files need lives on in the window.
                text = document.text if task.keep_text else ""
                origin = Document(text, document.id, document.title, document.url)
                yield _Tokenised(ids, part.source_number, origin)


def _kept(part: PartSlice, split: str) -> Iterator[Document]:
    """Yield the documents of one split, without the paragraphs that others have before them."""
    wanted = VALIDATION if split == "validation" else TRAIN
    fates = np.load(part.fates)[part.first : part.last]
    taken_out: dict[int, set[int]] = {}  # document of the unit -> lines
    for number, line in np.load(part.taken_out).tolist():
        taken_out.setdefault(number, set()).add(line)
    for number, document in read_part(part.file, fates == wanted):
        if repeated := taken_out.get(part.first + number):
            lines = enumerate(document.text.split("\n"))
            text = "\n".join(line for place, line in lines if place not in repeated)
            document = Document(text, document.id, document.title, document.url)
        yield document


STAGE = Stage(
    "pack",
    _plan,
    pack_unit,
    reads={"extract": ("part-*",), "deduplicate": ("*",), "vocabulary": ("*",)},
    files_read=lambda task: (
        file for part in task.slices for file in (part.file, part.fates, part.taken_out)
    ),
    leaves_rows=lambda records: any(
        record.result["shards"] for record in records if record.result["split"] == "train"
    ),
    warnings=lambda result: (
        [f"tokenising with the slower `tokenizers`: {result['slow']}"] if result.get("slow") else []
    ),
)
