"""Training objectives: one paper per file, each with its config class and its terms.

An objective returns a list of terms. The loop and the LM head know nothing else about it.
"""

from __future__ import annotations

from pretrain.objectives.terms import (
    Encoded,
    SignalTerm,
    Term,
    VocabularyTerm,
    cosine_term,
    kl_term,
    mlm_term,
)

__all__ = [
    "Encoded",
    "SignalTerm",
    "Term",
    "VocabularyTerm",
    "cosine_term",
    "kl_term",
    "mlm_term",
]
