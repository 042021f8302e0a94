"""The vocabulary head with its losses: no [positions, vocabulary] tensor ever exists.

`vocabulary` walks over the positions in chunks; what is done with a chunk's logits is a backend's:
`closed_form` in plain torch, `compiled` and `triton_kernel` for the same formulas in fewer passes,
`autograd` for terms that have no closed form here.
"""

from __future__ import annotations

from pretrain.kernels.head.vocabulary import Backend, Projection, vocabulary_losses

__all__ = ["Backend", "Projection", "vocabulary_losses"]
