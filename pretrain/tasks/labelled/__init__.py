"""Predict a label of each example: a class, a score, tags of words, or a span of a text."""
