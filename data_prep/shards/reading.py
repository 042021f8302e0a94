"""Rows of a split, read through memory-mapped numpy views."""

from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from data_prep import CorpusError
from data_prep.shards.manifest import AGAIN, Manifest, ShardRecord, load_manifest

Split = Literal["train", "validation"]


class ShardSet:
    """The rows of one split: `len()` rows of `row_length` ids; pickles as its folder's name."""

    def __init__(self, folder: Path, split: Split, manifest: Manifest) -> None:
        self.folder = folder
        self.split = split
        self.manifest = manifest
        self.row_length = manifest.row_length
        shards = manifest.splits[split].shards
        for shard in shards:
            check_size(folder, shard)
        self._starts = np.cumsum([0] + [shard.rows for shard in shards])
        self._views: list[npt.NDArray[Any] | None] = [None] * len(shards)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __reduce__(self) -> tuple[Any, ...]:
        # A DataLoader worker maps the files again instead of receiving their rows.
        return open_shards, (self.folder, self.split)

    def rows(self, indices: npt.ArrayLike) -> npt.NDArray[Any]:
        """Gather rows [n, row_length] in the manifest's dtype; IndexError outside 0..len-1."""
        wanted = np.asarray(indices, dtype=np.int64)
        assert wanted.ndim == 1
        if wanted.size and (wanted.min() < 0 or wanted.max() >= len(self)):
            raise IndexError(f"row outside 0..{len(self) - 1} in {self.folder} ({self.split})")
        rows = np.empty((wanted.size, self.row_length), dtype=self.manifest.dtype)
        shard_of = np.searchsorted(self._starts, wanted, side="right") - 1
        for shard in np.unique(shard_of):
            chosen = shard_of == shard
            rows[chosen] = self._view(int(shard))[wanted[chosen] - self._starts[shard]]
        return rows

    def _view(self, shard: int) -> npt.NDArray[Any]:
        view = self._views[shard]
        if view is None:
            record = self.manifest.splits[self.split].shards[shard]
            view = self._views[shard] = map_shard(self.folder, record, self.manifest)
        return view


def open_shards(folder: Path | str, split: Split = "train") -> ShardSet:
    """Open a split of a finished folder; raise CorpusError if it is unusable.

    Sizes are checked here, content is not: call `check` once before work starts.
    """
    folder = Path(folder)
    manifest = load_manifest(folder)
    if split not in manifest.splits:
        raise CorpusError(f"{folder}: has no {split} split: prepare it with a larger `validation`")
    return ShardSet(folder, split, manifest)


def check_size(folder: Path, record: ShardRecord) -> None:
    """Raise CorpusError unless the shard exists with the manifest's size."""
    path = folder / record.file
    if not path.is_file():
        raise CorpusError(f"{path}: missing: {AGAIN}")
    size = path.stat().st_size
    if size != record.bytes:
        raise CorpusError(f"{path}: {size} bytes, the manifest says {record.bytes}: {AGAIN}")


def map_shard(folder: Path, record: ShardRecord, manifest: Manifest) -> npt.NDArray[Any]:
    """A zero-copy view [rows, row_length] of one shard; raise CorpusError if it does not decode."""
    path = folder / record.file
    kind = pa.list_(getattr(pa, manifest.dtype)(), manifest.row_length)
    try:
        with pa.ipc.open_stream(pa.memory_map(str(path))) as stream:
            batch = stream.read_next_batch()
        column = batch.column("input_ids")
        column.validate()
        if column.type != kind or column.null_count or len(column) != record.rows:
            raise pa.ArrowInvalid(f"{len(column)} rows of {column.type}")
        values = column.flatten().to_numpy(zero_copy_only=True)
    except (pa.ArrowException, KeyError, StopIteration, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CorpusError(f"{path}: does not decode ({reason}): {AGAIN}") from None
    view: npt.NDArray[Any] = values.reshape(record.rows, manifest.row_length)
    return view
