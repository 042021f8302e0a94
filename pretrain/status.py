"""`exit_status.json`: how a run ended, for a launcher that cannot see the ranks' exit codes.

torchrun returns 1 whatever code its ranks end with. The file names the launch that wrote it
(environment DISTIL_LAUNCH), so that an old one is not taken for this one's.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from data_prep.disk.credentials import masked
from pretrain.files import write_json

LAUNCH = "DISTIL_LAUNCH"  # environment: the id of the launch
_NAME = "exit_status.json"


def write_status(
    output: Path, *, ended: str, step: int, num_steps: int, exit_code: int, error: str = ""
) -> None:
    """Replace the file; by one rank only. OSError if it cannot be written."""
    values = {
        "launch": os.environ.get(LAUNCH, ""),
        "ended": ended,
        "step": step,
        "num_steps": num_steps,
        "exit_code": exit_code,
        "error": masked(error),
        "time": time.time(),
    }
    write_json(output / _NAME, values)


def read_status(output: Path) -> dict[str, Any] | None:
    """What the file says; None if there is none, or none that can be read."""
    try:
        values = json.loads((output / _NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    sound = isinstance(values, dict) and type(values.get("exit_code")) is int
    return values if sound else None


def clear_status(output: Path) -> None:
    """Remove the file, if there is one."""
    (output / _NAME).unlink(missing_ok=True)
