"""Define the exit codes of all commands. `docs/distributed.md` describes them for users."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Say how a process ended."""

    DONE = 0
    BUG = 1
    MISTAKE = 2  # the user or the environment: one line names the culprit and the fix
    NOT_FINITE = 3  # a loss or a gradient that is not finite, or ranks that differ
    REQUEUE = 75  # stopped by a signal; the same command continues (EX_TEMPFAIL, as Slurm reads it)
    INTERRUPTED = 130  # a second Ctrl-C: no checkpoint
