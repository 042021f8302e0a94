"""Read datasets of the Hugging Face hub, and folders that `datasets` can load."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

from pydantic import Field

from data_prep import CorpusError
from data_prep.messages import error_line
from data_prep.sources.document import Document, Rejected
from data_prep.sources.files import Piece, opened, state_of_folder
from data_prep.sources.records import Record, RecordSource
from data_prep.sources.row_groups import RowGroups


@dataclass(frozen=True, slots=True)
class Dataset(Piece):
    """Hold a whole dataset: a commit of one of the hub, or a local folder (no commit)."""

    commit: str = ""

    def version(self) -> str:
        """Return the commit, or a hash of the versions of the folder's files."""
        return self.commit or self._state(Piece.version)

    def sha256(self) -> str:
        """Return a hash of the folder's files; "" of the hub, where the commit is enough."""
        return "" if self.commit else self._state(_file_hash)

    def _state(self, state: Callable[[Piece], str]) -> str:
        """Hash the state of all files, also behind links, without those of git and the hub."""
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
        """Return the dataset as one piece: a local folder, or a commit of the hub."""
        if os.path.exists(self.path):
            return [Dataset(self.path)]
        if re.fullmatch("[0-9a-f]{40}", self.revision or ""):
            return [Dataset(self.path, commit=str(self.revision))]
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
        return [Dataset(self.path, commit=str(commit))]

    def input_name(self, piece: Piece) -> str:
        """Return the name of a dataset of the hub, or of the folder of a local one."""
        assert isinstance(piece, Dataset)
        return piece.path if piece.commit else PurePath(piece.path).name

    def documents(self, piece: Piece) -> Iterator[Document | Rejected]:
        """Yield the records of one split, streamed; CorpusError if it cannot be loaded."""
        assert isinstance(piece, Dataset)
        return self.numbered_documents(self._rows(piece), piece.path, self.input_name(piece))

    def _rows(self, piece: Dataset) -> Iterator[Record]:
        import datasets
        import huggingface_hub

        # `datasets` takes a relative path for a name of the hub or of a format.
        path = piece.path if piece.commit else os.path.abspath(piece.path)
        try:
            if os.path.exists(os.path.join(path, "dataset_dict.json")) and not piece.commit:
                rows = iter(datasets.load_from_disk(path)[self.split])
            elif os.path.exists(os.path.join(path, "state.json")) and not piece.commit:
                rows = iter(datasets.load_from_disk(path))
            else:
                if piece.commit and not datasets.config.HF_HUB_OFFLINE:
                    # Without a network `datasets` tries for half a minute; this fails at once.
                    huggingface_hub.HfApi().dataset_info(path, revision=piece.commit, timeout=10)
                revision = piece.commit or None
                builder = datasets.load_dataset_builder(path, self.config, revision=revision)
                # `datasets` falls back to any commit in its cache if it cannot load the given one.
                if piece.commit and builder.hash != piece.commit:
                    raise ValueError(f"got commit {builder.hash} instead of {piece.commit}")
                rows = iter(builder.as_streaming_dataset(split=self.split))
        except Exception as error:
            raise CorpusError(
                f"{piece.path}: cannot load this dataset ({error_line(error)}); check path, "
                "config, split and network"
            ) from error
        for number, row in enumerate(rows):
            if number == 0 and self.text_field not in row:
                raise CorpusError(
                    f"{piece.path}: no field {self.text_field!r}; it has {', '.join(row)}"
                )
            yield row
