"""Shards -> student: the distillation itself, usable from Python without the command line."""

import os

# torch's libgomp reads this when it is loaded, so it is set before any module imports torch; child
# processes inherit it. docs/performance.md has the measurement behind the number.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")


class RunError(ValueError):
    """A mistake in a run's inputs or environment; one line with the culprit and the fix."""


class NumericalError(ArithmeticError):
    """The run's numbers cannot be trusted; it stopped before they could do harm."""


class NonFiniteError(NumericalError):
    """A loss or gradient that is not finite; raised before the optimizer step that would use it."""


class DivergedError(NumericalError):
    """The processes of one run hold different weights."""
