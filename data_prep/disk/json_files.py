"""Write and read JSON files: one spelling for hashes, one for files, one careful reader."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import stat
from pathlib import Path
from typing import Any

from data_prep.disk.atomic import write_file


class NotRegularError(OSError):
    """Report a pipe, a device or a folder where a file is expected."""


class TooLargeError(OSError):
    """Report a file with more bytes than its reader accepts."""


def canonical_sha256(value: object) -> str:
    """Return the sha256 of a value's one JSON spelling, with sorted keys and without spaces."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def self_sha256(values: dict[str, Any]) -> str:
    """Return the hash that seals an object: of all its fields except `self_sha256`."""
    return canonical_sha256({key: value for key, value in values.items() if key != "self_sha256"})


def indented_json(value: object) -> bytes:
    """Return the JSON spelling of files: indented, keys in order, one newline at the end."""
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def write_json(path: Path, value: object) -> None:
    """Write one JSON value atomically."""
    data = indented_json(value)
    write_file(path, lambda file: file.write(data))


def read_regular(path: Path, limit: int | None = None) -> bytes:
    """Return the bytes of a regular file.

    Raises:
        NotRegularError: the path is not a regular file. Reading from a pipe would block.
        TooLargeError: the file has more than `limit` bytes. A sparse file could fill the memory.
        OSError: the file is missing or cannot be read.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise NotRegularError(errno.EINVAL, "it is not a regular file", str(path))
    if limit is not None and status.st_size > limit:
        raise TooLargeError(errno.EFBIG, f"has {status.st_size:,} bytes", str(path))
    return path.read_bytes()


def read_regular_text(path: Path, limit: int | None = None) -> str:
    """Return the UTF-8 text of a regular file, with every line end as a newline."""
    return io.StringIO(read_regular(path, limit).decode(), newline=None).read()


def parse_object(data: bytes | str) -> dict[str, Any]:
    """Return a JSON object; raise ValueError for anything else."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value
