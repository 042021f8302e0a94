"""Check that torch has kernels for this machine's GPU, and name what computes a run."""

from __future__ import annotations

import re
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from pretrain import RunError
from pretrain.device.precision import PRECISIONS
from pretrain.kernels.attention.dispatch import usable
from pretrain.kernels.triton_support import use_triton


def check_kernels(device: torch.device) -> None:
    """Refuse a GPU for which torch was not built, before the first operation fails on it.

    Kernels of a capability (sm_80) run on GPUs of the same major version and an equal or later
    minor one (8.6). The driver compiles PTX (compute_80) for every later GPU. The suffix "a" limits
    an architecture to only that capability; "f" changes nothing here.

    Raises:
        RunError: naming the GPU, the architectures of the build, and a build that fits.
    """
    archs = torch.cuda.get_arch_list() if device.type == "cuda" and torch.version.cuda else []
    with warnings.catch_warnings():  # torch warns in many lines at the first use of the GPU
        warnings.simplefilter("ignore")
        capability = torch.cuda.get_device_capability(device) if archs else (0, 0)
    if not archs or any(_runs(arch, capability) for arch in archs):
        return
    # torch's builds for CUDA 12.6 support 5.0 to 9.0, those for 13.0 support 7.5 and later.
    build = "cu126" if capability < (7, 5) else "cu130"
    release = torch.__version__.partition("+")[0]
    raise RunError(
        f"{torch.cuda.get_device_name(device)} has compute capability "
        f"{capability[0]}.{capability[1]}, for which torch {torch.__version__} has no kernels (it "
        f"has {' '.join(archs)}); pip install --force-reinstall torch=={release} --index-url "
        f"https://download.pytorch.org/whl/{build}"
    )


def _runs(arch: str, capability: tuple[int, int]) -> bool:
    found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch)
    if not found:
        return True  # an unknown name of a later torch, which reports a missing kernel itself
    built = int(found[2]), int(found[3])
    if found[4] == "a":
        return capability == built
    if found[1] == "compute":
        return capability >= built
    return capability[0] == built[0] and capability >= built


def hardware_of(
    student: nn.Module,
    device: torch.device,
    precision: str,
    *,
    head: bool,
    attends: bool = True,
) -> dict[str, str]:
    """Return the names of the device and of the student's kernels.

    Args:
        student: of the run, on the device.
        device: of this rank.
        precision: of the run.
        head: whether the LM head is computed.
        attends: whether the student has attention.
    """
    config: Any = student.config
    name, dtype = "CPU", PRECISIONS[precision].dtype
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        name = f"{torch.cuda.get_device_name(device)} ({major}.{minor})"
    rates = ("attention_probs_dropout_prob", "attention_dropout")
    dropout = next((getattr(config, key) for key in rates if hasattr(config, key)), 0.0)
    width = config.hidden_size // config.num_attention_heads
    attention = usable(device, dtype, width, None, dropout)[0].__name__.replace("_", " ")
    if not attends:
        attention = "none"
    found = {"device": name, "attention": attention}
    if head:
        found["LM head"] = head_kernel(torch.empty(0, dtype=dtype, device=device))
    return found


def head_kernel(like: Tensor) -> str:
    """Return which code the LM head takes for a tensor: triton or torch."""
    return "triton" if use_triton("auto", like) else "torch"
