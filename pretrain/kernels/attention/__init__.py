"""Attend within the documents of packed rows, with the kernel of the device."""

from __future__ import annotations

from pretrain.kernels.attention.attend import attend

__all__ = ["attend"]
