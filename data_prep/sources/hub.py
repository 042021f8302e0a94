"""Read datasets of the Hugging Face hub, and folders that `datasets` can load."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import Field

from data_prep import CorpusError
from data_prep.disk.json_files import parse_object, read_regular
from data_prep.messages import error_line
from data_prep.sources.document import Document, Rejected
from data_prep.sources.files import Piece, opened, state_of_folder
from data_prep.sources.remote import is_remote, reached
from data_prep.sources.row_groups import RowGroups
from data_prep.sources.tables import Record, RecordSource

_ARROW_END = b"\xff\xff\xff\xff\0\0\0\0"  # the end of a stream of batches

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Dataset(Piece):
    """Hold a dataset, or one of its data files: of a commit of the hub, or of a local folder.

    The latter has no commit. `end` is None of a whole dataset, else `start` is the file's number.
    """

    crossed: ClassVar[bool] = False

    commit: str = ""
    file: str = ""  # name within the dataset
    listed: bool = True

    @property
    def is_listed(self) -> bool:
        """Return whether the hub has told the files."""
        return self.listed

    def version(self) -> str:
        """Return the commit, or a hash of the versions of the files that are read."""
        return self.commit or self._state(Piece.version)

    def sha256(self) -> str:
        """Return a hash of the files that are read; "" of the hub: the commit is enough."""
        return "" if self.commit else self._state(_file_hash)

    def _state(self, state: Callable[[Piece], str]) -> str:
        """Hash the state of all files, also behind links, without those of git and the hub.

        Of the data files only a piece's own counts: others have its ending.
        """
        seen = set()
        paths: list[str] = []
        for folder, folders, names in os.walk(self.path, followlinks=True):
            seen.add(os.path.realpath(folder))
            folders[:] = [
                name
                for name in folders
                if name not in (".git", ".cache")
                # A link may lead back.
                and os.path.realpath(os.path.join(folder, name)) not in seen
            ]
            paths += [os.path.join(folder, name) for name in names]
        if self.file:
            own, ending = os.path.join(self.path, self.file), PurePath(self.file).suffix
            if own not in paths:
                return ""
            paths = [path for path in paths if path == own or PurePath(path).suffix != ending]
        for path in paths:
            if not os.path.exists(path):
                raise CorpusError(f"{path}: a link to a missing file; fetch it, or remove the link")
        return state_of_folder(self.path, paths, state)


def _file_hash(piece: Piece) -> str:
    """Return a file's hash; of Parquet, that of its columns and footer, as Parquet sources do."""
    if os.path.isfile(piece.path):
        with opened(piece.path) as file:
            if file.read(4) == b"PAR1":
                return RowGroups(piece.path).sha256()
    return piece.sha256()


class HuggingFace(RecordSource):
    """Read a dataset of the hub (its name) or of a local folder; `config` is its configuration."""

    kind: Literal["huggingface"] = "huggingface"
    path: str = Field(min_length=1)
    """Name of a dataset on the hub, or a local folder of one."""
    config: str | None = None
    """Configuration of the dataset."""
    split: str = "train"
    """Split that is read."""
    revision: str | None = None
    """Branch, tag or commit."""

    def inputs(self, limit: int) -> Sequence[Piece]:
        """Return the data files of a local folder or of a commit of the hub, one piece each.

        A dataset of one file is one piece. So is one of the hub that does not answer: a commit is
        compared without a network.
        """
        whole = self._whole()
        try:
            files = self._loaded(whole, self._data_files)
        except CorpusError:
            if not whole.commit:
                raise
            return [replace(whole, listed=False)]
        if len(files) < 2:
            return [whole]
        return [
            replace(whole, start=number, end=number + 1, file=name, size=size or limit)
            for number, (name, size) in enumerate(files)
        ]

    def _whole(self) -> Dataset:
        """Return the dataset; its name on the hub becomes a commit."""
        if os.path.exists(self.path):
            return Dataset(self.path)
        if re.fullmatch("[0-9a-f]{40}", self.revision or ""):
            return Dataset(self.path, commit=str(self.revision))
        import datasets
        import huggingface_hub

        try:
            if datasets.config.HF_HUB_OFFLINE:
                builder = datasets.load_dataset_builder(
                    self.path, self.config, revision=self.revision
                )
                commit = builder.hash
            else:
                api = huggingface_hub.HfApi()
                commit = api.dataset_info(self.path, revision=self.revision, timeout=10).sha
            if not re.fullmatch("[0-9a-f]{40}", str(commit)):
                # `datasets` takes names such as text or csv for readers of the working directory.
                raise CorpusError("no dataset of the hub")
        except Exception as error:
            raise CorpusError(
                f"{self.path}: cannot load this dataset ({error_line(error)}); check path and "
                "network, or set `revision` to a commit, which needs no network to be compared"
            ) from error
        return Dataset(self.path, commit=str(commit))

    def input_name(self, piece: Piece) -> str:
        """Return the name of a dataset of the hub, or of a local folder, and that of the file."""
        assert isinstance(piece, Dataset)
        name = piece.path if piece.commit else PurePath(piece.path).name
        return f"{name}/{piece.file}" if piece.file else name

    def documents(self, piece: Piece) -> Iterator[Document | Rejected]:
        """Yield the records of one split, streamed; CorpusError if it cannot be loaded."""
        assert isinstance(piece, Dataset)
        if not piece.is_listed:
            self._loaded(piece, self._data_files)  # raises
            raise CorpusError(f"{piece.path}: did not answer at first: run the same command again")
        path = os.path.join(piece.path, piece.file)
        return self.numbered_documents(self._rows(piece), path, self.input_name(piece))

    def _rows(self, piece: Dataset) -> Iterator[Record]:
        rows: Iterator[dict[str, Any]] = self._loaded(piece, self._records)
        for number, row in enumerate(rows):
            missing = [key for key in self.columns if key not in row] if number == 0 else []
            if missing:
                raise CorpusError(f"{piece.path}: no field {missing[0]!r}; it has {', '.join(row)}")
            yield row

    def _loaded(self, piece: Dataset, load: Callable[[Dataset], Value]) -> Value:
        """Return `load(piece)`; CorpusError if it fails."""
        try:
            return load(piece)
        except Exception as error:
            raise CorpusError(
                f"{os.path.join(piece.path, piece.file)}: cannot load this dataset "
                f"({error_line(error)}); check path, config, split and network"
            ) from error

    def _data_files(self, whole: Dataset) -> list[tuple[str, int]]:
        """Return the name in the dataset and the bytes (0: not known) of each data file."""
        names, root, _ = self._listed(whole)
        return [(name, _size(root + name)) for name in names]

    def _listed(self, whole: Dataset) -> tuple[list[str], str, Any]:
        """Return the names of the data files, what stands before them, and the split as a stream.

        No names are returned of a dataset that is read as a whole, and no stream of a saved one.
        """
        stream = None
        if saved := _saved(whole, self.split):
            state = parse_object(read_regular(saved / "state.json"))
            paths = [str(saved / entry["filename"]) for entry in state["_data_files"]]
            for path in paths:
                _check_end(path)
            if state.get("_indices_files"):
                paths = []  # rows in a different order than in the files
        else:
            builder = self._builder(whole)
            stream = builder.as_streaming_dataset(split=self.split)
            paths = list((builder.config.data_files or {}).get(self.split, ()))
            if stream.num_shards != len(paths):
                paths = []
        if not whole.commit:
            paths = [*map(os.path.abspath, paths)]
        mark = f"@{whole.commit}/" if whole.commit else os.path.abspath(whole.path) + os.sep
        if not paths or not all(mark in path for path in paths):
            return [], "", stream  # such as a card that names files of other places
        before = paths[0].partition(mark)[0] + mark
        return [path.split(mark, 1)[1] for path in paths], before, stream

    def _records(self, piece: Dataset) -> Iterator[dict[str, Any]]:
        import datasets

        names, _, stream = self._listed(piece)
        # By number, of files that may have changed since they were planned.
        if piece.file and names[piece.start : piece.start + 1] != [piece.file]:
            raise CorpusError("files were added or removed: run the same command again")
        if stream is None and piece.file:
            return iter(datasets.Dataset.from_file(os.path.join(piece.path, piece.file)))
        if stream is None:
            return iter(datasets.load_from_disk(str(_saved(piece, self.split))))
        if piece.file:
            stream = stream.shard(num_shards=stream.num_shards, index=piece.start)
        return iter(stream)

    def _builder(self, piece: Dataset) -> Any:
        import datasets
        import huggingface_hub

        # `datasets` takes a relative path for a name of the hub or of a format.
        path = piece.path if piece.commit else os.path.abspath(piece.path)
        if piece.commit and not datasets.config.HF_HUB_OFFLINE:
            # Without a network `datasets` tries for half a minute; this fails at once.
            huggingface_hub.HfApi().dataset_info(path, revision=piece.commit, timeout=10)
        builder = datasets.load_dataset_builder(path, self.config, revision=piece.commit or None)
        # `datasets` falls back to any commit in its cache if it cannot load the given one.
        if piece.commit and builder.hash != piece.commit:
            raise ValueError(f"got commit {builder.hash} instead of {piece.commit}")
        return builder


def _saved(piece: Dataset, split: str) -> Path | None:
    """Return the folder of a split that `save_to_disk` wrote; None if it was not."""
    folder = Path(os.path.abspath(piece.path))
    if piece.commit:
        return None
    if (folder / "dataset_dict.json").exists():
        return folder / split
    return folder if (folder / "state.json").exists() else None


def _check_end(path: str) -> None:
    """Refuse a stream of Arrow that is cut short between two batches: it reads like a whole one."""
    with open(path, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - len(_ARROW_END)))
        if file.read() != _ARROW_END:
            raise CorpusError(f"{path}: cut short: it has no end marker")


def _size(path: str) -> int:
    """Return the bytes of a file here or of the hub; 0 if they are not known."""
    if not is_remote(path):
        return os.path.getsize(path)
    try:
        with reached(path) as (files, name):
            return int(files.info(name).get("size") or 0)
    except CorpusError:
        return 0
