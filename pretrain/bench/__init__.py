"""Measure our step and the baseline for `distil bench`, and compare them."""
