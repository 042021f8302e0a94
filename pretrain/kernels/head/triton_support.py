"""Decide whether the Triton kernel runs, without importing triton."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sysconfig
import warnings
from pathlib import Path

import torch
from torch import Tensor

from pretrain import RunError


def use_triton(backend: str, hidden: Tensor) -> bool:
    """Return whether `backend` means the Triton kernel for a tensor's device and precision.

    "auto" means it on GPUs of compute capability 8.0 or more, and warns if it cannot run there.
    With TRITON_INTERPRET=1, set before triton is imported, "triton" runs on CPU tensors, slowly:
    for tests.

    Raises:
        RunError: `backend` is "triton", which cannot run.
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    # The tensors: kernels are compiled for compute capability 8.0, and accumulate in fp32.
    unfit = None
    if hidden.dtype == torch.float64:
        unfit = "it computes in fp32, and the tensors are fp64; give fp32, bf16 or fp16"
    elif not interpreted and not hidden.is_cuda:
        unfit = f"the tensors are on {hidden.device.type}; use a GPU of compute capability 8.0"
    elif not interpreted:
        major, minor = torch.cuda.get_device_capability(hidden.device)
        if major < 8:
            unfit = f"the GPU's compute capability is {major}.{minor}; use one of 8.0 or more"
    # Asked for by name, the kernel must run: a silent replacement would make a test or a
    # measurement about something else.
    if backend == "triton":
        if obstacle := unfit or _missing():
            raise RunError(f'the head\'s backend "triton" cannot run: {obstacle}, or take "auto"')
        return True
    if backend != "auto" or unfit or not hidden.is_cuda:
        return False
    if obstacle := _missing():
        warnings.warn(f"the LM head runs in plain torch: {obstacle}", stacklevel=2)
        return False
    return True


@functools.cache
def _missing() -> str | None:
    """Return why Triton cannot run on this machine: it compiles a C module for its first kernel."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed; pip install triton"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton finds no C compiler; install gcc, or set CC"
    if not Path(sysconfig.get_path("include", "posix_prefix"), "Python.h").exists():
        return "Triton finds no Python.h; install Python's headers (python3-dev)"
    return None
