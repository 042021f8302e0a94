"""Measurements: `baseline` is the usual distillation step, `measure` times ours beside it.

These two need nothing but torch, transformers, numpy and the compute core of `pretrain`; the
scripts beside them measure other stages and say at the top what they do.
"""

import pretrain  # noqa: F401  bounds the spinning of OpenMP's threads before torch is imported
