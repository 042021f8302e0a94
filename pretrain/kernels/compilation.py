"""Compile functions with static shapes, into the same kernels at every start.

It computes what the uncompiled functions compute, and runs with `train.compile`. Functions are
compiled and modules are not wrapped: names of parameters and checkpoints do not change, and
evaluation, with batches of other shapes, calls the same models uncompiled.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from pretrain import RunError
from pretrain.kernels.triton_support import missing, reason_of

Function = TypeVar("Function", bound=Callable[..., Any])


def compile_static(function: Function, *, whole: bool) -> Function:
    """Return the function, compiled again for every new shape; as one graph if `whole`."""
    # By default the compiler times several versions of a GPU kernel and takes the fastest, which
    # may be a different one at the next start: a resumed run would have other bits.
    known = "deterministic" in torch._inductor.list_options()  # since torch 2.9
    options: Any = {"deterministic": True} if known else {}
    compiled: Any = torch.compile(function, dynamic=False, fullgraph=whole, options=options)
    return cast(Function, compiled)


def check_compiler(device: torch.device) -> None:
    """Check that this machine can compile, before a run starts.

    Raises:
        RunError: it cannot, for instance because no C++ compiler is installed.
    """

    if device.type == "cuda" and (obstacle := missing()):
        raise RunError(f"train.compile: {obstacle}, or set train.compile=false")

    def negative(x: torch.Tensor) -> torch.Tensor:
        return -x

    try:
        compile_static(negative, whole=True)(torch.ones(8, device=device))
    except Exception as error:  # the compiler raises a dozen classes
        if " " in tempfile.gettempdir():
            raise RunError(
                f"train.compile: torch's compiler fails in a path with a space, such as TMPDIR "
                f"{tempfile.gettempdir()}; set TMPDIR to another folder, or train.compile=false"
            ) from None
        raise RunError(
            f"train.compile: {reason_of(error)}. It needs a working C++ compiler and Python's "
            "headers: install them (`apt install g++ python3-dev`, or name one in CXX), or set "
            "train.compile=false"
        ) from None
