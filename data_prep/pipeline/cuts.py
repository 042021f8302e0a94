"""Keep where files are cut, so that later runs read no index and no footer of them again."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from data_prep.disk.json_files import (
    canonical_sha256,
    parse_object,
    read_regular,
    self_sha256,
    write_json,
)
from data_prep.messages import megabytes, one_line
from data_prep.sources import Piece, Source
from data_prep.sources.kind import FileSource
from data_prep.sources.remote import looked_up_once

_BEHAVIOUR = 2  # version of what cuts files; raise it when they are cut elsewhere
_LONG = 2e9  # bytes


class Cuts:
    """Hold the pieces of files by the keys of their source, path, version and the size of pieces.

    A file whose version is not known or has changed is cut again, and so are all if the file that
    keeps them is missing or damaged.
    """

    def __init__(self, file: Path, tell: Callable[[str], None]) -> None:
        self._file, self._tell = file, tell
        # By key, of each piece: the number of its class, start, end and size.
        self._kept: dict[str, list[tuple[int, int, int | None, int]]] = {}
        self._is_new = False
        try:
            values = parse_object(read_regular(file))
            if values["self_sha256"] == self_sha256(values):
                self._kept = values["cuts"]
        except (OSError, ValueError, KeyError):
            pass

    def inputs(self, source: Source, limit: int) -> Sequence[Piece]:
        """Return `source.inputs(limit)`."""
        if not isinstance(source, FileSource) or type(source).inputs is not FileSource.inputs:
            return source.inputs(limit)
        with looked_up_once():
            return [piece for file in source.files() for piece in self._cut(source, file, limit)]

    def _cut(self, source: FileSource, file: Piece, limit: int) -> list[Piece]:
        if not source.cut_by_content:
            return source.cut(file, limit)
        version = file.version()
        keys = source.model_dump(mode="json")  # with the columns that a footer must name
        own = [_BEHAVIOUR, file.path, version, file.size, source.cut_by(file), limit]
        key = canonical_sha256([keys, *own])
        if version and key in self._kept:
            return [
                source.pieces[kind](file.path, start, end, size)
                for kind, start, end, size in self._kept[key]
            ]
        pieces = source.cut(file, limit)
        if len(pieces) == 1 and file.size > _LONG:
            self._tell(
                f"{one_line(file.path)}: {megabytes(file.size)} MB are one unit of work: "
                "there is no place to cut; of a dump take the multistream file and its index"
            )
        if version:
            self._kept[key] = [
                (source.pieces.index(type(piece)), piece.start, piece.end, piece.size)
                for piece in pieces
            ]
            self._is_new = True
        return pieces

    def save(self) -> None:
        """Write what was cut since the file was read."""
        if self._is_new:
            values: dict[str, Any] = {"cuts": self._kept}
            fresh = self._file.with_name(f".{self._file.name}-{uuid.uuid4().hex[:8]}")
            write_json(fresh, values | {"self_sha256": self_sha256(values)})
            os.replace(fresh, self._file)  # other tasks write theirs
            self._is_new = False
