"""Read a teacher's answers from a file: vectors of documents, or logits of examples.

The file is safetensors with a tensor for each split of the shards. Its metadata say which shards
and which teacher it is of.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from data_prep.shards import Manifest
from pretrain import RunError

_TYPES = {"F16": np.float16, "F32": np.float32}


# What a file says of itself, and of each tensor its type and shape.
Answers = tuple[dict[str, str], dict[str, tuple[str, list[int]]]]


def read_answers(
    path: Path, what: str, manifest: Manifest, teacher: str | None, again: str
) -> Answers:
    """Return what the header of a file says.

    Args:
        path: the file.
        what: vectors or logits.
        manifest: of the shards that it must be of.
        teacher: digest of the teacher that it must be of; one that is not named is not compared.
        again: the end of a message, which says how to write the file again.

    Raises:
        RunError: it cannot be read, or is of different shards or a different teacher.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            tensors = {name: (s.get_dtype(), s.get_shape()) for name, s in slices.items()}
            known = file.metadata() or {}
    except (SafetensorError, OSError, ValueError) as error:
        raise RunError(f"{what} {path}: is not a safetensors file ({error}); {again}") from None
    if known.get("shards") != manifest.digest:
        raise RunError(f"{path}: holds {what} of different shards; {again}")
    if teacher is not None and known.get("teacher", "") not in ("", teacher):
        raise RunError(f"{path}: holds {what} of a different teacher; {again}")
    return known, tensors


def map_answers(path: Path, split: str) -> NDArray[Any]:
    """Return a split's tensor, mapped; the file was checked."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(size))[split]
    kind, begin = _TYPES[entry["dtype"]], 8 + size + entry["data_offsets"][0]
    return np.memmap(path, dtype=kind, mode="r", offset=begin, shape=tuple(entry["shape"]))


def data_sha256(path: Path) -> str:
    """Return the sha256 of what follows the header."""
    whole = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        while block := file.read(1 << 20):
            whole.update(block)
    return whole.hexdigest()
