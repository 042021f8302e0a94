"""The losses as pure functions: one value a position; no reduction, mask, weight or config.

The same functions serve as training terms and as metrics. They compute in fp32 whatever the inputs'
precision (fp64 stays fp64), since a bf16 softmax over 30,000 words is wrong in the second digit.

Shapes: N positions, V vocabulary, D width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def kl_divergence(student_NV: Tensor, teacher_NV: Tensor, *, temperature: float) -> Tensor:
    """T^2 * KL(softmax(teacher / T) || softmax(student / T)) [N].

    Hinton et al. 2015, section 2; L_ce of DistilBERT (arXiv 1910.01108, section 2).
    """
    log_p = F.log_softmax(_wide(teacher_NV) / temperature, dim=-1)
    log_q = F.log_softmax(_wide(student_NV) / temperature, dim=-1)
    return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1) * temperature**2


def cross_entropy(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """-log softmax(logits)[label] [N], 0 where the label is -100: masked language modelling."""
    return F.cross_entropy(_wide(logits_NV), labels_N, reduction="none")


def cosine_distance(student_ND: Tensor, teacher_ND: Tensor) -> Tensor:
    """1 - cos(student, teacher) [N]; L_cos of DistilBERT, on last hidden states."""
    return 1 - F.cosine_similarity(_wide(student_ND), _wide(teacher_ND), dim=-1)


def is_correct(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """1.0 where the most likely word is the label, else 0.0 [N]; their mean is the accuracy."""
    return (logits_NV.argmax(-1) == labels_N).float()


def agrees(student_NV: Tensor, teacher_NV: Tensor) -> Tensor:
    """1.0 where student and teacher have the same most likely word, else 0.0 [N]."""
    return (student_NV.argmax(-1) == teacher_NV.argmax(-1)).float()
