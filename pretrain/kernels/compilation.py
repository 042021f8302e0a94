"""torch.compile as a run uses it: static shapes, kernels that are the same at every start.

Functions are compiled, never modules wrapped: names of parameters and checkpoints stay what they
are, and evaluation, which has batches of its own, calls the same models uncompiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from pretrain import RunError

Function = TypeVar("Function", bound=Callable[..., Any])


def compile_static(function: Function, *, whole: bool) -> Function:
    """Return the function, compiled anew for every shape; in one piece if `whole`.

    By default the compiler times several versions of a GPU kernel and takes the fastest, which
    another start may find to be another: a resumed run would have other bits.
    """
    known = "deterministic" in torch._inductor.list_options()  # since torch 2.9
    options: Any = {"deterministic": True} if known else {}
    compiled: Any = torch.compile(function, dynamic=False, fullgraph=whole, options=options)
    return cast(Function, compiled)


def check_compiler(device: torch.device) -> None:
    """Compile next to nothing, to learn before a run starts whether this machine can.

    Raises:
        RunError: it cannot; for want of a C++ compiler, for instance.
    """

    def negative(x: torch.Tensor) -> torch.Tensor:
        return -x

    try:
        compile_static(negative, whole=True)(torch.ones(8, device=device))
    except Exception as error:  # the compiler's own, of a dozen kinds
        reason = next((line for line in str(error).splitlines() if line.strip()), "no reason given")
        raise RunError(
            f"train.compile: {reason.strip()[:200]}. It needs a working C++ compiler and Python's "
            "headers: install them (`apt install g++ python3-dev`, or name one in CXX), or set "
            "train.compile=false"
        ) from None
