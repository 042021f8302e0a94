"""Compute the losses of an LM head from full logits, to compare the fused forms with."""

from collections.abc import Sequence

import torch
from support.batches import terms_of
from torch import Tensor

from pretrain.contracts.terms import VocabularyTerm
from pretrain.kernels.head import Projection
from pretrain.objectives.distilbert import DistilBert


def logit_terms(**changes: float | str) -> list[VocabularyTerm]:
    """Return the terms over logits of DistilBERT's objective."""
    terms = terms_of(DistilBert.model_validate(changes))
    return [term for term in terms if isinstance(term, VocabularyTerm)]


def naive_sums(
    student: Projection, teacher: Projection, labels: Tensor, terms: Sequence[VocabularyTerm]
) -> Tensor:
    """Compute the sums of `terms` by formulas independent of `objectives/vocabulary_terms.py`."""

    def log_softmax(x: Tensor) -> Tensor:
        return x - x.exp().sum(-1, keepdim=True).log()

    ours = student.hidden_ND @ student.weight_VD.T + student.bias_V
    theirs = teacher.hidden_ND @ teacher.weight_VD.T + teacher.bias_V
    log_p, log_q = log_softmax(theirs / 2), log_softmax(ours / 2)
    kl = 4 * (log_p.exp() * (log_p - log_q)).sum(-1)
    known = labels >= 0
    log_likelihood = log_softmax(ours[: len(labels)])[known, labels[known]]
    sums = {
        ("kl", "tokens"): kl.sum(),
        ("kl", "masked"): kl[: len(labels)].sum(),
        ("mlm", "masked"): -log_likelihood.sum(),
    }
    return torch.stack([sums[term.name, term.over] for term in terms])
