"""Shards -> student: the distillation itself, usable from Python without the command line."""


class RunError(ValueError):
    """A mistake in a run's inputs or environment; one line with the culprit and the fix."""


class NumericalError(ArithmeticError):
    """The run's numbers cannot be trusted; it stopped before they could do harm."""


class NonFiniteError(NumericalError):
    """A loss or gradient that is not finite; raised before the optimizer step that would use it."""


class DivergedError(NumericalError):
    """The processes of one run hold different weights."""
