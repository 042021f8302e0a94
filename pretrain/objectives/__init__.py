"""What a run trains for: one paper a file, each with its config class and its terms.

An objective returns terms; the loop and the head know nothing else of it. A term names what it is
averaged over and gives one value a position, from the signals it asked for. The config classes are
in the papers' files; terms need nothing but torch.
"""

from __future__ import annotations

from pretrain.objectives.terms import (
    CrossEntropy,
    KLDivergence,
    Signals,
    Term,
    cosine_term,
    kl_term,
    mlm_term,
)

__all__ = [
    "CrossEntropy",
    "KLDivergence",
    "Signals",
    "Term",
    "cosine_term",
    "kl_term",
    "mlm_term",
]
