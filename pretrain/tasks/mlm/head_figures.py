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
from data_prep.tokens import of_shards
from pretrain.contracts.batch import IGNORE, Batch
from pretrain.contracts.terms import Term, VocabularyTerm, constant
from pretrain.objectives.vocabulary_terms import cross_entropy, kl_divergence
from pretrain.tasks.mlm.examples import MaskedRows, evaluation_masking, special_ids
from pretrain.tasks.task import Measure

# A token that was masked so often, never guessed, and costs more than by its frequency, is one that
# the teacher was not trained on. Of more than this share of the tokens users are told.
_OFTEN, _UNTRAINED, _NAMED = 20, 0.005, 10
_WORSE = 1.0  # nats: a teacher that knows only frequencies is near them, of any token


def measure_head(validation: ShardSet, *, teacher: bool, probability: float = 0.15) -> Measure:
    """Return what is measured of an LM head.

    The figures are loss (nats) and accuracy; with a teacher also kl (nats, temperature 1),
    agreement (same most likely token), teacher_accuracy, teacher_loss, and teacher_untrained, the
    share of tokens that it seems not to be trained on, if there are any; the number of masked
    tokens; and two baselines on the same positions: constant_accuracy, of the best constant answer
    (the most frequent label), and unigram_loss (nats), of the token frequencies of the training
    rows.

    Args:
        validation: the split.
        teacher: whether there is one.
        probability: share of the tokens that is masked.
    """
    size = validation.manifest.tokenizer.vocab_size
    guessed_2V = torch.zeros(2, size, dtype=torch.float64) if teacher else None
    terms = figures_of_head(guessed_2V)
    untrained: list[int] = []  # tokens, the most frequent first

    def tally(batch: Batch) -> Tensor:
        labels = batch.labels["masked"]
        counts_V = torch.bincount(labels[labels != IGNORE].long(), minlength=size).double()
        if guessed_2V is None:
            return counts_V
        found = torch.cat([counts_V, *guessed_2V])
        guessed_2V.zero_()
        return found

    def figures(
        totals: Mapping[str, float], counts: Mapping[str, float], tally_X: Tensor, step: int
    ) -> dict[str, float]:
        labels_V, *of_teacher = tally_X.view(-1, size)
        count, unigram_V = float(labels_V.sum()), unigram(validation)
        found = {
            **totals,
            "constant_accuracy": float(labels_V.max()),
            "unigram_loss": float(labels_V @ unigram_V),
        }
        if of_teacher:
            right_V, loss_V = of_teacher
            worse_V = loss_V > labels_V * (unigram_V + _WORSE)
            never_V = (labels_V >= _OFTEN) & (right_V == 0) & worse_V
            order = labels_V.argsort(descending=True, stable=True)
            untrained[:] = order[never_V[order]].tolist()
            if untrained:
                found["teacher_untrained"] = float(labels_V[never_V].sum())
        means = {name: total / max(count, 1.0) for name, total in found.items()}
        return {**means, "masked_tokens": count}

    def doubts(figures: Mapping[str, float]) -> list[str]:
        found = [weak_teacher(figures)]
        if (share := figures.get("teacher_untrained", 0.0)) > _UNTRAINED:
            backend = of_shards(validation.folder, validation.manifest).backend
            names = [repr(backend.id_to_token(token)) for token in untrained[:_NAMED]]
            found.append(
                f"the teacher never guesses {', '.join(names)}{' ...' * (len(untrained) > _NAMED)} "
                f"({share:.1%} of the masked tokens) and does far worse there than the tokens' "
                "frequencies, so it was not trained on them: is the text cut as its own was?"
            )
        return [text for text in found if text]

    # The same masks for every run, so that figures of two runs can be compared.
    examples = MaskedRows(validation, evaluation_masking(validation.manifest, probability))
    tallies = size * (3 if teacher else 1)
    counted = ("tokens", "masked")
    return Measure(examples, terms, figures, counted, tally=tally, tallies=tallies, doubts=doubts)


def figures_of_head(guessed_2V: Tensor | None) -> list[Term]:
    """Return what is measured at masked positions, as terms of weight 1.

    Args:
        guessed_2V: to these the teacher's right guesses and losses of each token are added, on the
            host; None without a teacher.
    """

    def of_teacher(_: Tensor, logits_NV: Tensor, labels_N: Tensor) -> Tensor:
        assert guessed_2V is not None
        loss_N = cross_entropy(logits_NV, labels_N)
        for sums_V, values_N in zip(
            guessed_2V, (is_correct(logits_NV, labels_N), loss_N), strict=True
        ):
            sums_V += torch.bincount(labels_N.cpu(), values_N.double().cpu(), len(sums_V))
        return loss_N

    def term(name: str, values: Callable[..., Tensor], needs_teacher: bool = False) -> Term:
        return VocabularyTerm(name, constant(1.0), "masked", values, needs_teacher)

    # None of them has a fused form, so the LM head computes their own functions on each chunk.
    terms = [
        term("loss", lambda s, t, labels: cross_entropy(s, labels)),
        term("accuracy", lambda s, t, labels: is_correct(s, labels)),
    ]
    if guessed_2V is not None:
        terms += [
            term("kl", lambda s, t, _: kl_divergence(s, t, temperature=1.0), True),
            term("agreement", lambda s, t, _: is_correct(s, t.argmax(-1)), True),
            term("teacher_accuracy", lambda s, t, labels: is_correct(t, labels), True),
            term("teacher_loss", of_teacher, True),
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
