"""Classify texts, pairs of texts, or give them a score."""
