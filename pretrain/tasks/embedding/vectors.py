"""Keep a teacher's vectors of a corpus's documents in a file, one row for each segment of a split.

    FILE           safetensors: tensors `train` and `validation` [segments, width] in fp16. The row
                   of a piece of a cut document is 0 and never read. The metadata say which shards
                   and which teacher they are of, with a checksum of the data.
    FILE.partial   the same while it is written, and in FILE.progress a hash of each unit on disk

Other programs may write such a file, too: of the metadata only `shards`, the digest in the shards'
manifest, is needed. `sha256` is that of all bytes behind the header; `teacher` is compared where
the run has a teacher.
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_prep.disk import lock, sync
from data_prep.disk.json_files import parse_object, read_regular
from data_prep.disk.replacing import replace_json, writing_to
from data_prep.shards import Manifest, Segments
from pretrain import RunError
from pretrain.tasks.answers import data_sha256, map_answers, read_answers

# Raised when the same teacher and texts would give other vectors. 2: word embeddings of an
# XLM-RoBERTa or CamemBERT without an LM head, which were random.
CODE = "2"
SEGMENTS = 4096  # written at a time: a kill costs at most these
_AGAIN = "name another file in `vectors:`, which is then written"
_SECONDS = 30  # between two lines on the screen


class Metadata(NamedTuple):
    """Hold the metadata of a file of vectors."""

    shards: str  # digest of their manifest
    teacher: str = ""  # digest of all that shapes a vector; empty in a file of another program
    name: str = ""  # the teacher's; empty if it is a local folder
    normalised: str = ""  # "true": the teacher divides a vector by its length
    sha256: str = ""  # hash of the data
    code: str = ""
    precision: str = ""  # the teacher's, for people: a finished file is used in any


def read_record(path: Path, manifest: Manifest, teacher: str | None) -> tuple[Metadata, int]:
    """Return a finished file's metadata and the width of its vectors.

    Args:
        path: the file.
        manifest: of the shards that it must be of.
        teacher: digest of the teacher that it must be of, where there is one.

    Raises:
        RunError: it cannot be read, or is of different shards or a different teacher.
    """
    known, shapes = read_answers(path, "vectors", manifest, teacher, _AGAIN)
    record = Metadata(**{key: v for key, v in known.items() if key in Metadata._fields})
    if record.teacher and record.code != CODE:
        raise RunError(
            f"{path}: an earlier version of this program wrote it, perhaps with different weights "
            f"of the teacher; {_AGAIN}"
        )
    # One tensor for each split, of one width.
    widths = set()
    for split, sizes in manifest.splits.items():
        dtype, shape = shapes.get(split, ("", []))
        if dtype != "F16" or len(shape) != 2 or shape[0] != sizes.segments:
            raise RunError(
                f"{path}: tensor {split} is {shape} of {dtype or 'nothing'}, and must be "
                f"[{sizes.segments}, width] of F16; {_AGAIN}"
            )
        widths.add(shape[1])
    if len(widths) != 1:
        raise RunError(f"{path}: vectors of several widths; {_AGAIN}")
    return record, int(widths.pop())


def check_vectors(path: Path, record: Metadata, splits: Mapping[str, Segments]) -> None:
    """Compare a file with its checksum, if it has one, and look at every vector that is read.

    Raises:
        RunError: they differ, or the vector of a whole document is not finite or all zeros.
    """
    if record.sha256 and data_sha256(path) != record.sha256:
        raise RunError(f"{path}: differs from its checksum; {_AGAIN}")
    for split, segments in splits.items():
        vectors = map_answers(path, split)
        whole = segments.of_rows(np.arange(len(segments.shards)))
        numbers = np.sort(whole.numbers[whole.whole])
        for begin in range(0, len(numbers), SEGMENTS):
            some = numbers[begin : begin + SEGMENTS]
            values = vectors[some]
            if fault := _fault(values):
                place, what = fault
                raise RunError(
                    f"{path}: the vector of {split} segment {some[place]} is {what}; write the "
                    "file again"
                )


def _fault(values: NDArray[np.float16]) -> tuple[int, str] | None:
    """Return the place of the first vector that is none, and why."""
    for bad, what in (
        (~np.isfinite(values).all(1), "not finite in fp16"),
        (~values.any(1), "all zeros"),
    ):
        if bad.any():
            return int(np.flatnonzero(bad)[0]), what
    return None


def write_vectors(
    path: Path,
    record: Metadata,
    splits: Mapping[str, Segments],
    encode: Callable[[Sequence[str]], NDArray[np.floating[Any]]],
    width: int,
    say: Callable[[str], None],
) -> None:
    """Write a file of vectors, or the rest of one whose writing was interrupted.

    Args:
        path: the file; it gets this name once it is complete and on disk.
        record: its metadata, without the checksum.
        splits: the segments of each split.
        encode: returns the vectors [n, width] of n texts.
        width: of a vector.
        say: shows lines.

    Raises:
        RunError: a vector is not finite, or unfinished ones were started for different
            shards or a different teacher.
        CorpusError: a text cannot be read.
        Busy: another process writes this file.
        OSError: the disk is full or read-only.
    """
    partial, progress = (path.with_name(f"{path.name}.{end}") for end in ("partial", "progress"))
    described = {**record._asdict(), "width": width, "segments": SEGMENTS}
    described["splits"] = {split: len(segments) for split, segments in splits.items()}
    header = _header(record._replace(sha256="0" * 64), described["splits"], width)
    row = 2 * width
    with writing_to(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with lock(path.parent, path.name, who="distil pretrain", output=path) as held:
        if path.exists():  # another process has finished it meanwhile
            return
        # Go on where an earlier start was killed.
        units = read_progress(progress, described) if partial.exists() else []
        done = sum(count for count, _ in units)
        _check_partial(partial, len(header), row, units)
        total, start, said, first = sum(described["splits"].values()), time.monotonic(), 0.0, done
        say(f"{path}: encoding {total:,} documents with the teacher")
        with writing_to(partial), partial.open("r+b" if done else "wb") as file:
            if not done:
                file.write(header)
            # What lies behind the noted end may be half written.
            file.truncate(len(header) + done * row)
            file.seek(0, os.SEEK_END)
            # The same units at every start, so that a file has the same bytes after any kill.
            before = 0  # segments of the splits before
            for segments in splits.values():
                for begin in range(0, len(segments), SEGMENTS):
                    end = min(begin + SEGMENTS, len(segments))
                    if before + end <= done:
                        continue
                    texts = segments.texts(begin, end)
                    there = [i for i, text in enumerate(texts) if text is not None]
                    values = np.zeros((end - begin, width), dtype=np.float16)
                    values[there] = encode([text for text in texts if text is not None])
                    if fault := _fault(values[there]):
                        place, what = fault
                        raise RunError(
                            f"teacher: its vector of segment {begin + there[place]} is {what}"
                        )
                    # Nobody else may have taken the file over while this process stood still.
                    held.check()
                    data = values.tobytes()
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                    done = before + end
                    units.append((end - begin, hashlib.sha256(data).hexdigest()))
                    # After the data: what is noted is on disk.
                    replace_json(progress, {**described, "units": units})
                    seconds = time.monotonic() - start
                    if seconds - said > _SECONDS:
                        said = seconds
                        rate = (done - first) / seconds
                        say(f"{path.name}: {done:,} of {total:,}, {rate:,.0f} a second")
                before += len(segments)
            # The checksum lies in the header, so all data come first.
            file.seek(0)
            sha256 = data_sha256(partial)
            file.write(_header(record._replace(sha256=sha256), described["splits"], width))
            file.flush()
            os.fsync(file.fileno())
        with writing_to(path):
            partial.rename(path)
            sync(path.parent)
            progress.unlink(missing_ok=True)
    # The lock files are not needed once the file exists: a process that takes the lock finds it.
    for other in path.parent.iterdir():
        if re.fullmatch(re.escape(path.name) + r"\.\d+\.lock", other.name):
            other.unlink(missing_ok=True)


def read_progress(path: Path, described: Mapping[str, Any]) -> list[tuple[int, str]]:
    """Return (vectors, sha256) of each unit of a file that is `described` and not finished.

    Raises:
        RunError: it cannot be read, or the unfinished file is a different one.
    """
    if not path.exists():
        return []
    try:
        noted = parse_object(read_regular(path))
        units = [(operator.index(count), str(sha256)) for count, sha256 in noted.pop("units")]
        total = sum(described["splits"].values())
        if any(count < 1 for count, _ in units) or sum(count for count, _ in units) > total:
            raise ValueError
    except (ValueError, KeyError, TypeError, OverflowError):
        raise RunError(
            f"{path}: damaged, or of an earlier version; remove it and the .partial file next to "
            "it to begin again"
        ) from None
    if noted != described:
        odd = [key for key in described if noted.get(key) != described[key]]
        names = {"shards": "different shards", "teacher": "a different teacher"}
        what = names.get(odd[0], f"a different {odd[0]}") if odd else "a different kind"
        raise RunError(
            f"{path}: its unfinished vectors are of {what}; remove it to begin again, or name "
            "another file"
        )
    return units


def _check_partial(path: Path, begin: int, row: int, units: Sequence[tuple[int, str]]) -> None:
    """Compare an unfinished file with the hashes of its units.

    Args:
        path: the file.
        begin: bytes of its header.
        row: bytes of a vector.
        units: (vectors, sha256) of each.

    Raises:
        RunError: a unit is not on disk as it was written.
    """
    if not units:
        return
    with path.open("rb") as file:
        file.seek(begin)
        for number, (count, sha256) in enumerate(units):
            if hashlib.sha256(file.read(count * row)).hexdigest() != sha256:
                raise RunError(
                    f"{path}: unit {number} of its vectors is not as it was written; remove it to "
                    "begin again"
                )


def _header(record: Metadata, splits: Mapping[str, int], width: int) -> bytes:
    """Return the beginning of a safetensors file; its length does not depend on the checksum."""
    begin, values = 0, {"__metadata__": record._asdict()}
    for split, rows in splits.items():
        end = begin + 2 * rows * width
        entry: dict[str, Any] = {"dtype": "F16", "shape": [rows, width]}
        values[split] = entry | {"data_offsets": [begin, end]}
        begin = end
    text = json.dumps(values).encode()
    text += b" " * (-len(text) % 8)  # aligned, as the format asks
    return len(text).to_bytes(8, "little") + text
