"""Find the whole documents of packed rows, for objectives that compare one vector of each.

A document that was cut to fit rows is left out: its vector would be that of another text.

Shapes: R or B rows, L row length, K the most whole documents of a row, S segments, D width of a
token, W of a vector.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from data_prep.shards import Segments, ShardSet
from pretrain.contracts.batch import Rows
from pretrain.tasks.answers import map_answers


class Documents:
    """Find the whole documents of rows of a split, and read their vectors from a file if given.

    A loader worker opens both again.
    """

    def __init__(self, shards: ShardSet, vectors: Path | None = None) -> None:
        self.shards, self.path = shards, vectors
        self.segments = Segments(shards)
        self._vectors: NDArray[np.float16] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Documents, (self.shards, self.path)

    def count(self) -> tuple[int, int]:
        """Return the number of complete documents, and of all segments."""
        whole = self.segments.of_rows(np.arange(len(self.shards))).whole
        return int(whole.sum()), len(whole)

    def __call__(
        self, ids: NDArray[Any], rows: NDArray[np.int64], skipped: NDArray[np.bool_] | None = None
    ) -> Rows:
        """Return the documents of rows with the uncorrupted ids [R, L] and the numbers [R].

        "documents" [R, L] has the place of each token's whole document in its row, -1 in none;
        "lengths" [R, K] the tokens of each, [CLS] and [SEP] included, 0 at an unused place; with a
        file "vectors" [R, K, W] the teacher's.

        Args:
            ids: as in the shards.
            rows: their numbers in the split.
            skipped: rows that are left out [R].
        """
        special = self.shards.manifest.tokenizer.special_ids
        # One look-up for all rows; the rest is arithmetic on what each segment is.
        found = self.segments.of_rows(rows)
        begins = ids == special.cls
        assert begins.sum(1).tolist() == found.counts.tolist(), "side tables of other rows"
        num_rows, row_of_S = len(rows), np.repeat(np.arange(len(rows)), found.counts)
        whole_S = found.whole
        # A row that is left out was turned into padding: its documents do not count.
        if skipped is not None:
            whole_S = whole_S & ~skipped[row_of_S]
        # The place of a whole document: how many come before it in its row.
        per_row = np.bincount(row_of_S[whole_S], minlength=num_rows)
        place_S = np.cumsum(whole_S) - 1 - (np.cumsum(per_row) - per_row)[row_of_S]
        place_S[~whole_S] = -1
        # The segment of each token, counted over all rows: a row begins with its first [CLS].
        segment_RL = np.cumsum(begins).reshape(ids.shape) - 1
        documents = np.where(ids != special.pad, place_S[segment_RL], -1)
        num_places = max(1, int(per_row.max(initial=0)))
        # The tokens of each place, over all rows at once.
        at = (np.arange(num_rows)[:, None] * num_places + documents)[documents >= 0]
        lengths = np.bincount(at, minlength=num_rows * num_places).reshape(num_rows, num_places)

        # In narrow types, as the ids: a worker sends them to the main process.
        result = {
            "documents": torch.from_numpy(documents.astype(np.int16)),
            "lengths": torch.from_numpy(lengths.astype(np.int16)),
        }
        # Read in the worker, so that training does not wait for the disk.
        if self.path is not None:
            if self._vectors is None:
                self._vectors = map_answers(self.path, self.shards.split)
            values = np.zeros((num_rows, num_places, self._vectors.shape[1]), dtype=np.float16)
            values[row_of_S[whole_S], place_S[whole_S]] = self._vectors[found.numbers[whole_S]]
            result["vectors"] = torch.from_numpy(values)
        return result
