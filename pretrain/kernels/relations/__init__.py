"""Compare how the tokens of a document are related in two models, as MiniLM and TinyBERT do."""

from __future__ import annotations

from pretrain.kernels.relations.compare import relation_divergence, score_difference

__all__ = ["relation_divergence", "score_difference"]
