"""Name the parts of a checkpoint, list checkpoints, and write the manifest."""

from __future__ import annotations

import hashlib
import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from data_prep.disk.json_files import indented_json

FORMAT = 2  # format 1 had no skipped rows
STUDENT = "student"
OPTIMIZER = "optimizer.safetensors"
ADAPTERS = "adapters.safetensors"  # only of an objective that has some
STATE = "state.json"
MANIFEST = "manifest.json"
LATEST = "latest"  # the newest checkpoint's name; replaced before an older one is removed
# AdamW's state of a parameter, named `parameter/state`: a counter, and tensors of its shape.
STEP, MOMENTS = "step", ("exp_avg", "exp_avg_sq")


def folder_name(step: int) -> str:
    """Return the name of a step's checkpoint."""
    return f"step-{step:08d}"


def checkpoints(root: Path) -> dict[int, Path]:
    """Return the committed folders by step, newest first.

    The number in the name decides, because modification times are unreliable. A listing during a
    save may show neither the new folder nor the removed one. The writer replaces the pointer
    between the two, so a listing is complete if the pointer is the same before and after it; else
    it is repeated.
    """
    while True:
        before = _pointer(root)
        found = {}
        with suppress(FileNotFoundError), os.scandir(root) as entries:
            for entry in entries:
                match = re.fullmatch(r"step-(\d{8,})", entry.name)
                if match and entry.is_dir():
                    found[int(match[1])] = root / entry.name
        # Unchanged: no save has removed a folder between the two reads.
        if _pointer(root) == before:
            return dict(sorted(found.items(), reverse=True))


def _pointer(root: Path) -> tuple[int, int, bytes] | None:
    """Return a value that changes whenever the pointer is replaced, even by the same text."""
    try:
        with (root / LATEST).open("rb") as file:
            status = os.fstat(file.fileno())
            # Its text would not show that it was replaced by the same name.
            return status.st_ino, status.st_mtime_ns, file.read()
    except OSError:
        return None


def manifest_bytes(values: dict[str, Any]) -> bytes:
    """Return the content of manifest.json, which includes its own hash."""
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    return indented_json({**values, "sha256": digest})
