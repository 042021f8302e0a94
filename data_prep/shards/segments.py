"""Number the segments of a split in row order; tell which are whole documents, and their text.

A segment is one [CLS] ... [SEP] of a row: a document, or a piece of one that is longer than a row.
Shapes: R rows, S segments of these rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from data_prep import CorpusError
from data_prep.shards.manifest import AGAIN, side_file, text_file
from data_prep.shards.reading import ShardSet, decoded, map_texts, read_segments
from data_prep.shards.verifying import check_file


class RowSegments(NamedTuple):
    """Hold the segments of some rows, row after row and from left to right."""

    counts: npt.NDArray[np.int64]  # [R] segments of each row
    numbers: npt.NDArray[np.int64]  # [S] over the split in row order, from 0
    whole: npt.NDArray[np.bool_]  # [S] False: a piece of a document that was cut to fit rows


class Segments:
    """Number the segments of a split; `len()` of them, it is pickled as its folder's name.

    All pieces of a document are in one shard, and its side table names the document of each. So a
    document is whole if its id occurs there once. Where several documents of a source have the same
    id (an `id_field` that is not unique), all of them count as cut.
    """

    def __init__(self, shards: ShardSet) -> None:
        """Raise CorpusError if side tables are missing, or their lengths differ from the manifest.

        A table is read and compared with its sha256 when one of its rows is first asked for.
        """
        self.shards = shards
        split = shards.manifest.splits[shards.split]
        sizes = []
        for shard in split.shards:
            path = check_file(shards.folder, shards.manifest, side_file(shard.file), full=False)
            with decoded(path):
                sizes.append(pq.read_metadata(path).num_rows)
        if sum(sizes) != split.segments:
            raise CorpusError(
                f"{shards.folder}: {shards.split} side tables name {sum(sizes)} segments, the "
                f"manifest says {split.segments}: {AGAIN}"
            )
        self._starts = np.cumsum([0, *sizes])  # the first segment of each shard, and the end
        self._first = np.empty(
            len(shards) + 1, dtype=np.int64
        )  # first segment of each row, and the end
        self._first[shards.starts] = self._starts
        self._whole = np.empty(split.segments, dtype=bool)
        self._read = np.zeros(len(sizes), dtype=bool)  # shards whose part of these is filled in
        self._texts: list[pa.Array | None] = [None] * len(sizes)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __reduce__(self) -> tuple[Any, ...]:
        return Segments, (self.shards,)

    def of_rows(self, rows: npt.ArrayLike) -> RowSegments:
        """Return the segments of rows [R] of the split, in the order given.

        Raises:
            IndexError: a row is outside 0..len(shards) - 1.
            CorpusError: a side table is damaged.
        """
        wanted = np.asarray(rows, dtype=np.int64)
        shard_of = self.shards.shard_of(wanted)
        for number in np.unique(shard_of[~self._read[shard_of]]).tolist():
            self._read_shard(number)
        first = self._first[wanted]
        counts = self._first[wanted + 1] - first
        # The numbers of a row follow each other: count over all rows, and move each row's start.
        before = np.cumsum(counts) - counts
        numbers = np.repeat(first - before, counts) + np.arange(counts.sum())
        return RowSegments(counts, numbers, self._whole[numbers])

    def texts(self, first: int, last: int) -> list[str | None]:
        """Return the cleaned texts of segments `first` to `last` - 1 (None: part of a document).

        Each file is compared with its sha256 when this process first needs it, then mapped.

        Raises:
            IndexError: a segment is outside 0..len - 1.
            CorpusError: no text was kept, or a file of texts is damaged.
        """
        folder, manifest = self.shards.folder, self.shards.manifest
        if not manifest.has_texts:
            raise CorpusError(
                f"{folder}: keeps no text: run `distil prepare` with `keep_text: true` and another "
                "`output`"
            )
        if not 0 <= first <= last <= len(self):
            raise IndexError(f"{folder}: segments {first} to {last} are outside 0 to {len(self)}")
        found: list[str | None] = []
        for number, record in enumerate(manifest.splits[self.shards.split].shards):
            start, end = self._starts[number : number + 2].tolist()
            if end <= first or last <= start:
                continue
            column = self._texts[number]
            if column is None:
                path = check_file(folder, manifest, text_file(record.file))
                column = self._texts[number] = map_texts(path)["text"]
                if len(column) != end - start:
                    raise CorpusError(f"{path}: {len(column)} texts of {end - start}: {AGAIN}")
            found += column[max(first - start, 0) : last - start].to_pylist()
        return found

    def _read_shard(self, number: int) -> None:
        """Read a shard's side table into `_first` and `_whole`."""
        shards = self.shards
        start, end = self._starts[number : number + 2].tolist()
        name = shards.manifest.splits[shards.split].shards[number].file
        path = check_file(shards.folder, shards.manifest, side_file(name))
        rows = slice(*shards.starts[number : number + 2].tolist())
        row, whole = read_segments(path)
        counts = np.bincount(row, minlength=rows.stop - rows.start)
        if len(whole) != end - start or len(counts) != rows.stop - rows.start:
            raise CorpusError(f"{path}: does not match the segments of its shard: {AGAIN}")
        self._first[rows] = start + np.cumsum(counts) - counts
        self._whole[start:end] = whole
        self._read[number] = True
