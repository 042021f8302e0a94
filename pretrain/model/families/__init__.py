"""Name the parts of each family of encoders, and walk over their layers in the same way."""

from __future__ import annotations

from pretrain.model.families.family import Blocks, Family, MaskedLM
from pretrain.model.families.walk import FAMILIES, encode, family_of, has_types, shape_of

__all__ = [
    "FAMILIES",
    "Blocks",
    "Family",
    "MaskedLM",
    "encode",
    "family_of",
    "has_types",
    "shape_of",
]
