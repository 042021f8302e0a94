"""Evaluate on validation rows, with the same rows and masks every time.

Every selected token becomes [MASK], from one fixed key that training never uses. All figures are
means over the masked positions.

Shapes: N positions, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from data_prep.shards import Manifest, ShardSet, check, open_shards
from pretrain.checkpoint import Saved
from pretrain.contracts.terms import COUNTS, Term, VocabularyTerm, constant
from pretrain.data.rows import corrupt, masking_over, special_ids
from pretrain.device.gpu import check_kernels
from pretrain.model.distillation import Distillation, micro_batch
from pretrain.model.families import MaskedLM
from pretrain.model.loading import check_row_length, load_model
from pretrain.model.model_files import read_model
from pretrain.model.pooling import SentenceHead
from pretrain.model.student import build_student
from pretrain.model.teacher import (
    Teacher,
    check_vocabulary,
    load_teacher,
    parameters_sha256,
)
from pretrain.objectives.vocabulary_terms import cross_entropy, kl_divergence
from pretrain.output import noted_layers, recorded, sealed_state
from pretrain.tasks.embedding.documents import Documents
from pretrain.tasks.mlm.masking import IGNORE, Masking

_KEY = 0x4556414C  # "EVAL"
UNTRAINED = "the same layers, untrained"


def evaluate(
    student: MaskedLM,
    teacher: MaskedLM | None,
    shards: ShardSet,
    *,
    rows: int,
    batch_size: int = 32,
    probability: float = 0.15,
    accelerator: Accelerator,
    autocast: AbstractContextManager[Any] | None = None,
    own_terms: Sequence[Term] = (),
    adapters: nn.ModuleDict | None = None,
    step: int = 0,
    head: SentenceHead | None = None,
    documents: Documents | None = None,
) -> dict[str, float]:
    """Evaluate on the first `rows` rows of a split, divided among the ranks.

    Args:
        student, teacher: on the accelerator's device.
        shards: the split.
        rows: fewer if there are fewer.
        batch_size: rows at a time.
        probability: share of the tokens that is masked.
        accelerator: of this rank.
        autocast: the precision; the accelerator's by default.
        own_terms: of an objective that trains no LM head. They are all that is measured then, on
            rows without masks.
        adapters: those of the own terms.
        step: whose weights the loss of the own terms has.
        head: makes sentence vectors of the teacher's hidden states.
        documents: finds whole documents for terms on their vectors; rows are then evenly spaced.

    Returns:
        loss (nats) and accuracy; with a teacher also kl (nats, temperature 1), agreement (same
        most likely token), teacher_accuracy and teacher_loss; the number of masked tokens; and two
        baselines on the same positions: constant_accuracy, of the best constant answer (the most
        frequent label), and unigram_loss (nats), of the token frequencies of the training rows.
        With `own_terms` the mean of each, their weighted sum as loss, and the number of tokens.
    """
    rows = min(rows, len(shards))
    numbers = np.arange(rows)
    if documents is not None:  # packing puts the longest ones first, most of which were cut
        numbers = numbers * len(shards) // max(rows, 1)
    mine = np.array_split(numbers, accelerator.num_processes)[accelerator.process_index]
    special = shards.manifest.tokenizer.special_ids
    # The same masks for every run, so that figures of two runs can be compared.
    masking = evaluation_masking(shards.manifest, 0.0 if own_terms else probability)

    terms = list(own_terms) or figures_of_head(with_teacher=teacher is not None)
    size = shards.manifest.tokenizer.vocab_size
    module = Distillation(
        student, teacher, terms, pad_id=special.pad, num_tokens=size, adapters=adapters, head=head
    )
    ones = torch.ones(len(terms), device=accelerator.device)

    # Sums of this rank: one entry per term, one per count, then the number of masked labels of each
    # token.
    # Without dropout. Training goes on in the mode it was in.
    was_training = student.training
    student.eval()
    # In fp64, because sums of many batches are added.
    sizes = [len(terms), len(COUNTS), size]
    totals_T, counts_C, labels_V = torch.zeros(sum(sizes), dtype=torch.float64).split(sizes)
    with torch.no_grad(), autocast or accelerator.autocast():
        for batch in np.array_split(mine, -(-len(mine) // batch_size) or 1):
            if len(batch) == 0:  # more ranks than rows
                continue
            found = corrupt(shards, masking, np.zeros_like(batch), batch, documents=documents)
            inputs = micro_batch(*found, cls_id=special.cls, pad_id=special.pad)
            # Counted on the host, before the copy to the device.
            labels = inputs.labels[inputs.labels != IGNORE].long()
            labels_V += torch.bincount(labels, minlength=size)
            counts_C += torch.tensor([inputs.counts[name] for name in COUNTS])
            _, values = module(*inputs.to(accelerator.device), ones)
            totals_T += values.cpu()  # device sync, once per batch
    student.train(was_training)
    if accelerator.num_processes > 1:
        sums = torch.cat([totals_T, counts_C, labels_V]).to(accelerator.device)
        totals_T, counts_C, labels_V = accelerator.reduce(sums, "sum").cpu().split(sizes)
    totals = dict(zip((term.name for term in terms), totals_T.tolist(), strict=True))
    counts = dict(zip(COUNTS, counts_C.tolist(), strict=True))

    if own_terms:
        own = {term.name: totals[term.name] / max(counts[term.over], 1.0) for term in own_terms}
        loss = sum(term.weight(step) * own[term.name] for term in own_terms)
        return {**own, "loss": loss, "tokens": counts["tokens"]}

    # Means over the masked tokens of all ranks.
    count = float(labels_V.sum())
    totals["constant_accuracy"] = float(labels_V.max())
    totals["unigram_loss"] = float(labels_V @ unigram(shards))
    means = {name: total / max(count, 1.0) for name, total in totals.items()}
    return {**means, "masked_tokens": count}


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


def evaluation_masking(manifest: Manifest, probability: float) -> Masking:
    """Return the fixed masks of evaluation: uniform, all [MASK], the same for every run."""
    return replace(masking_over(manifest, probability, _KEY), replace="mask")


def is_correct(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """Return 1.0 where the most likely token is the label, else 0.0 [N]; their mean is accuracy."""
    return (logits_NV.argmax(-1) == labels_N).float()


def evaluate_folder(model: Path, shards: Path, **options: Any) -> dict[str, float]:
    """Evaluate one model, without its student at step 0; see `evaluate_folders`."""
    return evaluate_folders([str(model)], shards, starts=False, **options)[str(model)]


def evaluate_folders(
    models: Sequence[str],
    shards: Path,
    *,
    teacher: str | None = None,
    same_vocabulary: bool = False,
    rows: int = 1024,
    starts: bool = True,
    warn: Callable[[str], None],
) -> dict[str, dict[str, float]]:
    """Evaluate runs' newest checkpoints, or any folders with a model, on a corpus.

    With a teacher the students of runs before training are evaluated, too, unless `starts` is
    False. With `same_vocabulary` tokenizers may differ or be missing; see `RunConfig`.

    Returns:
        the figures of `evaluate` for each model, by name.

    Raises:
        RunError, CorpusError: a model, teacher or shards cannot be used, or do not fit together.
    """
    manifest = check(shards)

    def load_student(name: str) -> MaskedLM:
        def load(folder: Path, saved: Saved | None) -> MaskedLM:
            student = load_model(folder)
            required = not same_vocabulary
            check_vocabulary(name, folder, student.config, manifest, required=required)
            return student

        student = read_model(Path(name), load, warn)
        check_row_length(name, student.config, manifest)
        return student

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    check_kernels(accelerator.device)
    known: Teacher | None = None

    def figures(student: MaskedLM) -> dict[str, float]:
        return evaluate(
            student.to(accelerator.device),
            known.model.to(accelerator.device) if known is not None else None,
            open_shards(shards, "validation"),
            rows=rows,
            accelerator=accelerator,
            autocast=nullcontext(),  # fp32, also where this process trained in another precision
        )

    found = {}
    for name in models:
        student = load_student(name)
        if teacher is not None and known is None:
            known = load_teacher(teacher, manifest, shards, same_vocabulary=same_vocabulary)
        found[name] = figures(student)
    if known is not None and starts:
        for name, start in students_at_start(models, known).items():
            found[name] = figures(start)
    return found


def students_at_start(
    models: Sequence[str], teacher: Teacher, *, needs_head: bool = True
) -> dict[str, MaskedLM]:
    """Return the students of runs as they were at step 0, equal ones once, each with its name.

    The layers are those that a run has noted, whatever is the default today. A model that is not a
    run, or did not start from layers of this teacher, has none.
    """
    found: dict[tuple[object, ...], tuple[str, MaskedLM]] = {}
    weights = teacher.sha256
    for name in models:
        sealed, config = sealed_state(Path(name)), recorded(Path(name))
        layers = noted_layers(sealed[1]) if sealed is not None else ()
        if sealed is None or config is None or not layers:
            continue
        weights = weights or parameters_sha256(teacher.model)
        key = (layers, config.student.architecture)
        if key in found or sealed[1]["teacher"]["sha256"] != weights:
            continue
        begun = config.student.model_copy(update={"init": layers, "num_layers": None})
        model = build_student(begun, teacher, config.train.seed, needs_head=needs_head)
        found[key] = name, model.eval()
    return {
        UNTRAINED if len(found) == 1 else f"{Path(name).name}, untrained": model
        for name, model in found.values()
    }
