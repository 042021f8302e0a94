"""Measure an LM head on validation rows, with the same rows and masks every time.

Every selected token becomes [MASK], from one fixed key that training never uses. All figures are
means over the masked positions.

Shapes: N positions, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from data_prep.shards import ShardSet
from pretrain.contracts.batch import IGNORE, Batch
from pretrain.contracts.terms import Term, VocabularyTerm, constant
from pretrain.objectives.vocabulary_terms import cross_entropy, kl_divergence
from pretrain.tasks.mlm.examples import MaskedRows, evaluation_masking, special_ids
from pretrain.tasks.task import Measure


def measure_head(validation: ShardSet, *, teacher: bool, probability: float = 0.15) -> Measure:
    """Return what is measured of an LM head.

    The figures are loss (nats) and accuracy; with a teacher also kl (nats, temperature 1),
    agreement (same most likely token), teacher_accuracy and teacher_loss; the number of masked
    tokens; and two baselines on the same positions: constant_accuracy, of the best constant answer
    (the most frequent label), and unigram_loss (nats), of the token frequencies of the training
    rows.

    Args:
        validation: the split.
        teacher: whether there is one.
        probability: share of the tokens that is masked.
    """
    terms = figures_of_head(with_teacher=teacher)
    size = validation.manifest.tokenizer.vocab_size

    def tally(batch: Batch) -> Tensor:
        # Counted on the host, before the copy to the device.
        labels = batch.labels["masked"]
        return torch.bincount(labels[labels != IGNORE].long(), minlength=size)

    def figures(
        totals: Mapping[str, float], counts: Mapping[str, float], labels_V: Tensor, step: int
    ) -> dict[str, float]:
        count = float(labels_V.sum())
        found = {
            **totals,
            "constant_accuracy": float(labels_V.max()),
            "unigram_loss": float(labels_V @ unigram(validation)),
        }
        means = {name: total / max(count, 1.0) for name, total in found.items()}
        return {**means, "masked_tokens": count}

    # The same masks for every run, so that figures of two runs can be compared.
    examples = MaskedRows(validation, evaluation_masking(validation.manifest, probability))
    return Measure(examples, terms, figures, ("tokens", "masked"), tally=tally, tallies=size)


def figures_of_head(*, with_teacher: bool) -> list[Term]:
    """Return what is measured at masked positions, as terms of weight 1."""

    def term(name: str, values: Callable[..., Tensor], needs_teacher: bool = False) -> Term:
        return VocabularyTerm(name, constant(1.0), "masked", values, needs_teacher)

    # None of them has a fused form, so the LM head computes their own functions on each chunk.
    terms = [
        term("loss", lambda s, t, labels: cross_entropy(s, labels)),
        term("accuracy", lambda s, t, labels: is_correct(s, labels)),
    ]
    if with_teacher:
        terms += [
            term("kl", lambda s, t, _: kl_divergence(s, t, temperature=1.0), True),
            term("agreement", lambda s, t, _: is_correct(s, t.argmax(-1)), True),
            term("teacher_accuracy", lambda s, t, labels: is_correct(t, labels), True),
            term("teacher_loss", lambda s, t, labels: cross_entropy(t, labels), True),
        ]
    return terms


def unigram(shards: ShardSet) -> Tensor:
    """Return -log p of each token [V], where p is its share of the training rows' tokens.

    One is added to each count. Special tokens are never predicted: their value is 0.
    """
    table = json.loads((shards.folder / "token_counts.json").read_text(encoding="utf-8"))
    counts_V = torch.tensor(table["counts"], dtype=torch.float64) + 1
    never = list(special_ids(shards.manifest))
    counts_V[never] = 0
    unigram_V = counts_V.sum().log() - counts_V.log()
    unigram_V[never] = 0
    return unigram_V


def weak_teacher(figures: Mapping[str, float]) -> str:
    """Return a warning about a teacher that does not beat the frequencies of tokens, else empty."""
    if figures.get("teacher_loss", 0.0) < figures.get("unigram_loss", 1.0):
        return ""
    return (
        f"the teacher's masked-token loss is {figures['teacher_loss']:.3f} nats, no better than "
        f"{figures['unigram_loss']:.3f} of the tokens' frequencies: is its language-model head "
        "trained, and on such text?"
    )


def is_correct(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """Return 1.0 where the most likely token is the label, else 0.0 [N]; their mean is accuracy."""
    return (logits_NV.argmax(-1) == labels_N).float()
