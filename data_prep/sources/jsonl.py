"""Read JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import ClassVar, Literal

from data_prep import CorpusError
from data_prep.messages import error_line, one_line
from data_prep.sources.document import Document, Rejected
from data_prep.sources.files import LONG_LINE, Piece, lines
from data_prep.sources.records import RecordSource

_FIELDS_SHOWN = 100  # characters
_RECORDS = 100  # so many records of a file are read for their fields


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

    def check(self, pieces: Sequence[Piece]) -> None:
        """Refuse a field that none of the first records of some files has.

        A document without one is set aside or gets another id, so a wrong key would leave out all
        texts in silence.
        """
        missing, first, num = dict.fromkeys(self.columns), "", 0
        for path in self.sampled(pieces):
            with suppress(CorpusError):  # the file is damaged: its unit says so
                for _, line in islice(lines(path), _RECORDS):
                    try:
                        record = json.loads((line or b"").decode("utf-8-sig"))
                    except (ValueError, RecursionError):
                        continue
                    if isinstance(record, dict):
                        num += 1
                        first = first or one_line(", ".join(record), _FIELDS_SHOWN)
                        missing = {key: None for key in missing if key not in record}
            if not missing:
                return
        if num:
            raise CorpusError(
                f"{one_line(self.path)}: none of its first {num:,} records has a field "
                f"{next(iter(missing))!r}; the first one has {first}: correct the key"
            )
