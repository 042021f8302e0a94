"""Where the parts of a checkpoint lie, and the manifest that seals them."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

FORMAT = 2  # 1 had no skipped rows in its state
STUDENT = "student"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
MANIFEST = "manifest.json"
MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # of AdamW, behind the parameter's name and a slash


def folder_name(step: int) -> str:
    """The name of a step's checkpoint."""
    return f"step-{step:08d}"


def checkpoints(root: Path) -> dict[int, Path]:
    """The committed folders by step, newest first: by number, for modification times lie."""
    found = {
        int(match[1]): path
        for path in root.glob("step-*")
        if (match := re.fullmatch(r"step-(\d{8,})", path.name)) and path.is_dir()
    }
    return dict(sorted(found.items(), reverse=True))


def manifest_bytes(values: dict[str, Any]) -> bytes:
    """manifest.json of these values, with its own hash; there is one way to write it."""
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    return as_json({**values, "sha256": digest})


def as_json(value: object) -> bytes:
    """Indented, keys in order, one newline at the end."""
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()
