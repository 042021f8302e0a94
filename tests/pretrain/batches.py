"""Build the micro-batches that tests of the training step share."""

import numpy as np
import torch
from torch import Tensor

from pretrain.data.masking import Masking
from pretrain.model.distillation import MicroBatch, micro_batch


def masked_batch(ids: Tensor) -> MicroBatch:
    """Mask a fifth of the packed rows `ids`, so that even the fullest row has unused slots."""
    masking = Masking(0.2, (0, 1, 2, 3, 4), mask_id=4, vocab_size=200, seed=3)
    numbers = np.arange(len(ids))
    masked = masking(ids.numpy(), np.zeros_like(numbers), numbers)
    return micro_batch(*map(torch.from_numpy, masked), cls_id=2, pad_id=0)
