"""Where the parts of a checkpoint lie, and the manifest that seals them."""

from __future__ import annotations

import hashlib
import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

FORMAT = 2  # 1 had no skipped rows in its state
STUDENT = "student"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
MANIFEST = "manifest.json"
LATEST = "latest"  # the newest checkpoint's name; replaced before an older one is removed
# AdamW's state, behind the parameter's name and a slash: a counter, and tensors of its shape.
STEP, MOMENTS = "step", ("exp_avg", "exp_avg_sq")


def folder_name(step: int) -> str:
    """Return the name of a step's checkpoint."""
    return f"step-{step:08d}"


def checkpoints(root: Path) -> dict[int, Path]:
    """Return the committed folders by step, newest first: by number, for modification times lie.

    A listing that a save overtakes may show neither the folder that came nor the one that went. The
    writer replaces the pointer between the two, so a listing is complete if the pointer is the same
    before and after it; else it is taken again.
    """
    while True:
        before = _pointer(root)
        found = {}
        with suppress(FileNotFoundError), os.scandir(root) as entries:
            for entry in entries:
                match = re.fullmatch(r"step-(\d{8,})", entry.name)
                if match and entry.is_dir():
                    found[int(match[1])] = root / entry.name
        if _pointer(root) == before:
            return dict(sorted(found.items(), reverse=True))


def _pointer(root: Path) -> tuple[int, int, bytes] | None:
    """Return what changes whenever the pointer is replaced, even by the same text."""
    try:
        with (root / LATEST).open("rb") as file:
            status = os.fstat(file.fileno())
            return status.st_ino, status.st_mtime_ns, file.read()
    except OSError:
        return None


def manifest_bytes(values: dict[str, Any]) -> bytes:
    """manifest.json of these values, with its own hash; there is one way to write it."""
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    return as_json({**values, "sha256": digest})


def as_json(value: object) -> bytes:
    """Indented, keys in order, one newline at the end."""
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()
