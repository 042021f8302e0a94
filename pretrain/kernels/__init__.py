"""Faster implementations of the same results. Skip them on a first reading."""
