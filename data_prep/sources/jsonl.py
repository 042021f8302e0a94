"""Read JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import ClassVar, Literal

from data_prep import CorpusError
from data_prep.messages import error_line, one_line
from data_prep.sources.document import Document, Rejected
from data_prep.sources.files import LONG_LINE, Piece, lines
from data_prep.sources.records import RecordSource

_FIELDS_SHOWN = 100  # characters


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
        """Yield the records that begin in a piece.

        Raises:
            CorpusError: a file is cut short, or none of the records at its beginning has a field.
        """
        name, first = self.input_name(piece), ""
        missing = dict.fromkeys(self.columns) if piece.start == 0 else {}
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
                    if missing:
                        first = first or one_line(", ".join(record), _FIELDS_SHOWN)
                        missing = {key: None for key in missing if key not in record}
                    yield self.document(record, where)
                else:
                    detail = f"no object but a {type(record).__name__}"
                    yield Rejected(where, "malformed json", detail)
        if first and missing:
            raise CorpusError(
                f"{one_line(piece.path)}: no record has a field {next(iter(missing))!r}; the first "
                f"one has {first}: correct the key, or leave the file out by a pattern in `path`"
            )
