"""Name what computes a run: device, attention and LM head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pretrain.device.precision import PRECISIONS
from pretrain.kernels.attention.dispatch import usable
from pretrain.kernels.triton_support import use_triton


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
