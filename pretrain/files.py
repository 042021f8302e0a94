"""Writing files so that a reader sees the old one or the new one, and an error names its place."""

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
    """Around what writes below `path`: every failure becomes an OSError that names it.

    A failing write() knows no name, a copy names its source, and safetensors wraps what the disk
    said in an error of its own.
    """
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise OSError(f"{path}: {error}") from error
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def replace_text(path: Path, text: str) -> None:
    """Write a small text file whole."""
    with writing_to(path):
        write_file(path, lambda file: file.write(text.encode()))


def write_json(path: Path, value: object) -> None:
    """Replace a small JSON file."""
    with writing_to(path):
        json_files.write_json(path, value)
