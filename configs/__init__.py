"""Shipped configs, one complete YAML a run; `distil` finds them by name when installed."""
