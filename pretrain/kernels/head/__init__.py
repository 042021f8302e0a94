"""Compute the LM head with its losses, without a tensor of [positions, vocabulary].

`vocabulary` computes logits in chunks of positions. A backend turns a chunk's logits into losses
and gradients: `closed_form` in plain torch, `triton_kernel` for the same formulas in fewer passes,
and autograd for terms without a closed form.
"""

from __future__ import annotations

from pretrain.kernels.head.vocabulary import Backend, Projection, vocabulary_losses

__all__ = ["Backend", "Projection", "vocabulary_losses"]
