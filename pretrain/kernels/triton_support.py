"""Decide whether the Triton kernels run, of the LM head and of relations, without importing triton.

They were run on GPUs of compute capability 9.0. On older ones than 8.0 they are compared with plain
torch before their first use.
"""

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

_TOLERANCE = 1e-3  # relative, for values and gradients; fp16 rounds gradients to 5e-4


def use_triton(backend: str, hidden: Tensor) -> bool:
    """Return whether `backend` means the Triton kernel for a tensor's device and precision.

    "auto" means it on GPUs of compute capability 8.0 or more, and in fp16 and fp32 of 7.0 or more;
    it warns if the kernel cannot run there. With TRITON_INTERPRET=1, set before triton is imported,
    "triton" runs on CPU tensors, slowly: for tests.

    Raises:
        RunError: `backend` is "triton", which cannot run.
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    capability = (9, 0)
    if hidden.is_cuda:
        capability = torch.cuda.get_device_capability(hidden.device)
    unfit = unfit_for(capability, hidden.dtype)
    if not (unfit or interpreted or hidden.is_cuda):
        unfit = f"the tensors are on {hidden.device.type}; use a GPU of compute capability 7.0"
    # Asked for by name, the kernel must run: a silent replacement would make a test or a
    # measurement about something else.
    if backend == "triton":
        if obstacle := unfit or missing() or _differs(capability, hidden):
            raise RunError(f'the head\'s backend "triton" cannot run: {obstacle}, or take "auto"')
        return True
    if backend != "auto" or unfit or not hidden.is_cuda:
        return False
    if obstacle := missing() or _differs(capability, hidden):
        warnings.warn(f"LM head and relations run in plain torch: {obstacle}", stacklevel=2)
        return False
    return True


def unfit_for(capability: tuple[int, int], dtype: torch.dtype) -> str | None:
    """Return why tensors of this type are not for the kernels of such a GPU; None if they are."""
    number = "{}.{}".format(*capability)
    if dtype == torch.float64:
        return "it computes in fp32, and the tensors are fp64; give fp32, bf16 or fp16"
    if capability < (7, 0):
        return f"the GPU's compute capability is {number}; use one of 7.0 or more"
    if capability < (8, 0) and dtype == torch.bfloat16:
        return f"the GPU's compute capability is {number}, too old for bf16; give fp16 or fp32"
    return None


def _differs(capability: tuple[int, int], tensor: Tensor) -> str | None:
    return None if capability >= (8, 0) else compared(tensor.device, tensor.dtype)


@functools.cache
def compared(device: torch.device, dtype: torch.dtype) -> str | None:
    """Compute tiles by the kernels and by plain torch in fp32; return what differs, or None."""
    from pretrain.kernels.head import closed_form, triton_kernel
    from pretrain.kernels.relations import formulas, fused

    generator = torch.Generator().manual_seed(0)
    logits = [3 * torch.randn(48, 5000, generator=generator).to(device, dtype) for _ in range(2)]
    scores = [3 * torch.randn(2, 3, 40, 40, generator=generator).to(device) for _ in range(2)]
    labels = torch.arange(32, device=device) * 150
    weights = closed_form.Weights(torch.ones(48, device=device), torch.ones(32, device=device))
    lengths = torch.tensor([40, 33], device=device)
    results = []
    try:
        for head, kl, squares, precision in (
            (closed_form, formulas.divergence, formulas.squared_difference, torch.float32),
            (triton_kernel, fused.divergence, fused.squared_difference, dtype),
        ):
            student, teacher = (t.to(precision, copy=True) for t in logits)
            values = head.losses_and_gradient(
                student, teacher, labels, weights, temperature=2.0, with_gradient=True
            )
            found = [*values, student]
            for formula in (kl, squares):
                found += formula(scores[0].clone(), scores[1].clone(), lengths)
            results.append([t.float() for t in found if t is not None])
    except Exception as error:  # the compiler raises a dozen classes
        return f"Triton's kernels do not run on this GPU ({reason_of(error)})"
    far = max(
        float((ours - exact).norm() / exact.norm()) for exact, ours in zip(*results, strict=True)
    )
    if far <= _TOLERANCE:
        return None
    return f"Triton's kernels differ from plain torch by {far:.0e} on this GPU"


def reason_of(error: Exception) -> str:
    """Return the first line of a compiler's error; others follow by the hundred."""
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), "no reason given")[:200]


@functools.cache
def missing() -> str | None:
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
