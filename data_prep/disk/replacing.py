"""Write files so that a reader sees the old or the new one, and an error names the path."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from data_prep.disk import json_files, write_file


@contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """Turn every failure of a block that writes below `path` into an OSError that names it.

    The error of write() has no file name, that of a copy names the source, and safetensors raises
    its own class.
    """
    try:
        yield
    except SafetensorError as error:
        # safetensors (a Rust library) puts the system's error number into its text.
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise OSError(f"{path}: {error}") from error
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def replace_text(path: Path, text: str) -> None:
    """Replace a small text file atomically."""
    with writing_to(path):
        write_file(path, lambda file: file.write(text.encode()))


def replace_json(path: Path, value: object) -> None:
    """Replace a small JSON file atomically."""
    with writing_to(path):
        json_files.write_json(path, value)
