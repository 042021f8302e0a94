"""Build the micro-batches that tests of the training step share."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pretrain.contracts.batch import Batch
from pretrain.contracts.terms import Shape, Term
from pretrain.objectives.objective import Objective
from pretrain.tasks.mlm.examples import masked_batch
from pretrain.tasks.mlm.masking import Masking


def terms_of(objective: Objective) -> tuple[Term, ...]:
    """Return an objective's terms for a tiny student and a tiny teacher."""
    return objective.terms(Shape(2, 32, 4), Shape(4, 32, 4))


def mean_coefficients(terms: Sequence[Term], batch: Batch, **options: Any) -> Tensor:
    """Return weight / count of each term, which makes the loss the weighted sum of means."""
    return torch.tensor([term.weight(0) / batch.counts[term.over] for term in terms], **options)


def drawn_batch(ids: Tensor) -> Batch:
    """Mask a fifth of the packed rows `ids`, so that even the fullest row has unused slots."""
    masking = Masking(0.2, (0, 1, 2, 3, 4), mask_id=4, vocab_size=200, seed=3)
    numbers = np.arange(len(ids))
    masked = masking(ids.numpy(), np.zeros_like(numbers), numbers)
    return masked_batch(*map(torch.from_numpy, masked), cls_id=2, pad_id=0)
