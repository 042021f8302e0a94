"""Define the sizes of an encoder, which an objective checks before any weights are read."""

from __future__ import annotations

from typing import NamedTuple

# Of a DistilBERT's config.json; other families name sizes as BERT does.
DISTILBERT_NAMES = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
}


class Shape(NamedTuple):
    """Hold the sizes of an encoder, which config.json gives before any weights are read."""

    num_layers: int
    hidden_size: int  # of query, key and value, too, with all heads side by side
    num_heads: int
    vector_size: int = 0  # of a teacher's sentence vectors; 0 where none are compared
