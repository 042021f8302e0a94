"""Measure our step for `distil bench`, and describe the machine."""
