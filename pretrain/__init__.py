"""Distil a student from shards; usable from Python without the command line.

from pretrain import compress, distil, encode, MaskingCollator
"""

import os
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launch.api import MaskingCollator, compress, distil, encode

__all__ = ["MaskingCollator", "RunError", "compress", "distil", "encode"]

try:
    __version__ = version("distil-pretraining")
except PackageNotFoundError:  # a checkout that was not installed
    __version__ = "0+unknown"

# torch's libgomp reads this when it is loaded, so it is set before any module imports torch; child
# processes inherit it. docs/performance.md has the measurement behind the number.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")

# On a GPU the number of documents, and so the shapes, change from step to step. With segments that
# can grow, torch's allocator holds fewer blocks of sizes that never come again. It reads this when
# the GPU is first used. Torch 2.9 renamed the variable, and warns of the old name.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
if not any(name in os.environ for name in _ALLOCATOR):
    renamed = [int(part) for part in version("torch").split(".")[:2]] >= [2, 9]
    os.environ[_ALLOCATOR[0 if renamed else 1]] = "expandable_segments:True"


class RunError(ValueError):
    """Report a mistake in a run's inputs or environment in one line, with the fix."""


class NumericalError(ArithmeticError):
    """Report numbers that cannot be trusted; the run stopped before it used them."""


class NonFiniteError(NumericalError):
    """Report a loss or gradient that is not finite, before the optimizer step that would use it."""


class DivergedError(NumericalError):
    """Report ranks of one run that hold different weights."""


def __getattr__(name: str) -> Any:
    """Import what `launch.api` offers when it is first used: torch takes seconds."""
    if name in __all__:
        return getattr(import_module("launch.api"), name)
    raise AttributeError(f"module 'pretrain' has no attribute {name!r}")
