"""Read JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import ClassVar, Literal

from data_prep.messages import error_line
from data_prep.sources.document import Document, Rejected
from data_prep.sources.files import LONG_LINE, Piece, lines
from data_prep.sources.records import RecordSource


class Jsonl(RecordSource):
    """Read JSON lines, plain or compressed: one object a line."""

    patterns: ClassVar[tuple[str, ...]] = tuple(
        name + end
        for name in ("*.jsonl", "*.ndjson", "*.json")
        for end in ("", ".gz", ".bz2", ".zst")
    )

    by_range: ClassVar[bool] = True

    kind: Literal["jsonl"] = "jsonl"

    def documents(self, piece: Piece) -> Iterator[Document | Rejected]:
        """Yield the records that begin in a piece; CorpusError if a file is cut short."""
        name = self.input_name(piece)
        for offset, line in lines(piece.path, piece.start, piece.end):
            where = f"{name}@{offset}"
            if line is None:
                yield Rejected(where, "too long", LONG_LINE)
                continue
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8-sig"))
            except UnicodeDecodeError as error:
                detail = f"{error.reason} at byte {error.start} of the line"
                yield Rejected(where, "not utf-8", detail)
            except (ValueError, RecursionError) as error:
                yield Rejected(where, "malformed json", error_line(error))
            else:
                if isinstance(record, dict):
                    yield self.document(record, where)
                else:
                    detail = f"no object but a {type(record).__name__}"
                    yield Rejected(where, "malformed json", detail)
