"""Attend within the documents of packed rows, with the kernel of the device."""

from __future__ import annotations

from pretrain.kernels.attention.dispatch import attend

__all__ = ["attend"]
