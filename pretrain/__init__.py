"""Distil a student from shards; usable from Python without the command line."""

import os

# torch's libgomp reads this when it is loaded, so it is set before any module imports torch; child
# processes inherit it. docs/performance.md has the measurement behind the number.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")


class RunError(ValueError):
    """Report a mistake in a run's inputs or environment in one line, with the fix."""


class NumericalError(ArithmeticError):
    """Report numbers that cannot be trusted; the run stopped before it used them."""


class NonFiniteError(NumericalError):
    """Report a loss or gradient that is not finite, before the optimizer step that would use it."""


class DivergedError(NumericalError):
    """Report ranks of one run that hold different weights."""
