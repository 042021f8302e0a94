"""Measure speed, memory and faults; each script's first lines say what it prints and when."""

import pretrain  # noqa: F401  limits how long OpenMP's threads spin, before torch is imported
