"""Record in `exit_status.json` how a run ended.

A launcher cannot see the exit codes of ranks: torchrun returns 1 for all of them. The file names
the launch that wrote it (environment DISTIL_LAUNCH), so that an old file is recognised.
"""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

from data_prep.disk.credentials import masked
from data_prep.disk.json_files import parse_object, read_regular
from data_prep.disk.replacing import replace_json
from data_prep.shards import CorpusError
from pretrain import NumericalError, RunError
from pretrain.contracts.process import LAUNCH, ExitCode
from pretrain.device.memory import out_of_memory

STATUS = "exit_status.json"
_FULL = "; free some space, then run the same command again; what is finished stays"
_TAKEN = "; a file is where a folder should be, or the other way round; choose another path"
_REMEDIES = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EROFS: "; the disk is read-only; set `output:` to a place that can be written",
    errno.EACCES: "; change its permissions, or use a path that this user may read and write",
    errno.ENOTDIR: _TAKEN,
    errno.EEXIST: _TAKEN,
    errno.EFBIG: "; a file-size limit was reached; raise it (ulimit -f) or write elsewhere",
}


def verdict(error: BaseException) -> tuple[int, str]:
    """Return the exit code and the message of a process that ends with `error`."""
    name = type(error).__name__
    # `jointly` ends the ranks on which nothing went wrong this way.
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(bool(error.code))
        return code, "another process of this run failed; its log says why"
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED, f"{name}: interrupted at once, without a checkpoint"
    if isinstance(error, NumericalError):
        return ExitCode.NOT_FINITE, str(error)
    # Errors that a user can fix: one line and exit code 2, without a traceback.
    if isinstance(error, RunError | CorpusError):
        return ExitCode.MISTAKE, str(error)
    if out_of_memory(error):
        said = str(error).partition("\n")[0] or name
        return (
            ExitCode.MISTAKE,
            f"out of memory ({said}): end other programs, or use a machine with more",
        )
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        remedy = _REMEDIES.get(error.errno or 0, "")
        return ExitCode.MISTAKE, f"{where}{error.strerror or error or name}{remedy}"
    return ExitCode.BUG, f"{name}: {error}".removesuffix(": ")


def write_status(
    output: Path, *, ended: str, step: int, num_steps: int, exit_code: int, error: str = ""
) -> None:
    """Replace the file; only one rank calls it.

    Raises:
        OSError: it cannot be written.
    """
    values = {
        "launch": os.environ.get(LAUNCH, ""),
        "ended": ended,
        "step": step,
        "num_steps": num_steps,
        "exit_code": exit_code,
        # Messages may quote a URL with its password.
        "error": masked(error),
        "time": time.time(),
    }
    replace_json(output / STATUS, values)


def read_status(output: Path) -> dict[str, Any] | None:
    """Return the content of the file; None if it is missing or unreadable."""
    try:
        values = parse_object(read_regular(output / STATUS))
    except (OSError, ValueError):
        return None
    return values if type(values.get("exit_code")) is int else None
