"""Define a kind of source: the keys and traits of all kinds, and the methods that read one."""

from __future__ import annotations

import glob
import os
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import PurePath, PurePosixPath
from typing import ClassVar

from pydantic import Field, field_validator

from data_prep.keys import Keys
from data_prep.sources.document import Document, Rejected
from data_prep.sources.files import Piece, byte_ranges, find_files
from data_prep.sources.remote import bare, is_remote
from data_prep.text.language import CODES


class FileSource(Keys):
    """Read a file, a folder (searched recursively), a glob, or a URL of one of these.

    URLs are read through fsspec: s3://, gs://, hf://, https:// and whatever else it knows. A kind
    says how documents are read.
    """

    patterns: ClassVar[tuple[str, ...]]  # names of a folder's files that are read
    by_range: ClassVar[bool] = False  # a range of bytes of a plain file can be read on its own
    cut_by_content: ClassVar[bool] = False  # does `cut` read the file?
    pieces: ClassVar[tuple[type[Piece], ...]] = (Piece,)  # what `cut` returns
    by_line: ClassVar[bool] = False  # each line of a document is one sentence
    # The last bytes of a record, and what closes a file that is cut there.
    record_end: ClassVar[tuple[bytes, bytes]] = (b"\n", b"")

    name: str | None = None
    """Of the source in tables. None: the last part of its path."""
    licence: str = "unknown"
    """Of the texts, for manifest and model card."""
    fraction: float = Field(default=1.0, gt=0.0, le=1.0)
    """Share of the documents that is kept."""
    languages: tuple[str, ...] | None = None
    """ISO 639-1 codes: a text that is surely in another language is dropped."""

    @field_validator("languages")
    @classmethod
    def _codes(cls, languages: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if languages is not None and not languages:
            raise ValueError("no language is named; leave the key out to keep all")
        for code in languages or ():
            if code not in CODES:
                raise ValueError(f"{code!r} is not a language code such as en or de")
        return languages

    @property
    def is_wikipedia(self) -> bool:
        """Return whether the texts are Wikipedia's, so that left-over markup is counted."""
        return False

    def check(self, pieces: Sequence[Piece]) -> None:
        """Refuse a mistake of the keys that shows before all is read; raises CorpusError."""

    @abstractmethod
    def documents(self, piece: Piece) -> Iterator[Document | Rejected]:
        """Yield the documents of one piece, in order and in bounded memory.

        All pieces together hold each document of the inputs once, whatever `limit` was. A bad
        document is yielded as Rejected; a truncated or unreadable file raises CorpusError.
        """

    path: str = Field(min_length=1)
    """File, folder, glob, or URL of one of these."""

    @property
    def label(self) -> str:
        """Return the source's name in manifests and tables: the last part of its path if none."""
        path = bare(self.path) if is_remote(self.path) else self.path
        return self.name or PurePath(path).name or path

    def files(self) -> list[Piece]:
        """Return the files, each whole; CorpusError if there are none."""
        return find_files(self.path, self.patterns)

    def cut(self, file: Piece, limit: int) -> list[Piece]:
        """Return a file in pieces; the result depends only on its content and `limit`."""
        return byte_ranges(file, limit) if self.by_range else [file]

    def cut_by(self, file: Piece) -> str:
        """Return the version of another file that decides where a file is cut; "" without one."""
        return ""

    def inputs(self, limit: int) -> Sequence[Piece]:
        """Return the inputs in order, cut into pieces of about `limit` bytes where possible.

        The result depends only on the files and `limit`. Raises CorpusError if there are none.
        """
        return [piece for file in self.files() for piece in self.cut(file, limit)]

    def input_name(self, piece: Piece) -> str:
        """Return an input's name in records, the stem of its documents' ids: as in `path`."""
        within = f"{self.path.rstrip('/')}/"
        if os.sep == "/" and not is_remote(self.path) and piece.path.startswith(within):
            # Of many small files PurePath would take a good part of the time.
            name = piece.path[len(within) :]
            if name and "//" not in name and "./" not in name:
                return name.encode("utf-8", "backslashreplace").decode()
        root: PurePath
        file: PurePath
        if is_remote(self.path):
            root, file = PurePosixPath(bare(self.path)), PurePosixPath(bare(piece.path))
        else:
            root, file = PurePath(self.path), PurePath(piece.path)
        if file == root:
            root = file.parent
        elif not file.is_relative_to(root):
            # `a/*/b.txt` is relative to `a`.
            wild = [i for i, part in enumerate(root.parts) if glob.has_magic(part)]
            root = type(root)(*root.parts[: wild[0]]) if wild else root.parent
        rest = file.relative_to(root) if file.is_relative_to(root) else PurePath(file.name)
        # A file's name may be any bytes.
        return rest.as_posix().encode("utf-8", "backslashreplace").decode()
