"""Compute each objective as one would write it with transformers: what `distil bench` compares.

Both models are called as they are, with padded sequences of one document each and a 2-D mask.
Hidden states and attention probabilities come from `output_hidden_states` and `output_attentions`;
query, key and value, which transformers does not return, from forward hooks on their linear layers.
Every tensor exists in full. Attention is torch's `sdpa`, the default of transformers, and `eager`
only where probabilities are asked for, which no other returns.

A new objective is a function here and a line in `FORMULATIONS`.

Shapes: B sequences, L length, V vocabulary, D width, A heads, N selected positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pretrain import RunError
from pretrain.bench.baseline import (
    TRIPLE_LOSS,
    BaselineStep,
    Inputs,
    Padded,
    selected,
    shapes_of,
    triple_loss,
)
from pretrain.device.precision import Precision
from pretrain.model.families import MaskedLM, family_of, shape_of
from pretrain.model.families.post_norm import PostNorm
from pretrain.objectives.distilbert import DistilBert
from pretrain.objectives.embedding import Embedding
from pretrain.objectives.minilm import MiniLM, divergence, relation
from pretrain.objectives.mlm import MaskedLanguageModel
from pretrain.objectives.objective import Objective
from pretrain.objectives.tinybert import TinyBert, scores, squared_difference

Formulation = Callable[[Any, Inputs], dict[str, Tensor]]  # the mean of each term, by its name


def distilbert(objective: DistilBert, inputs: Inputs) -> dict[str, Tensor]:
    """Compute the triple loss and its options."""
    weights = {key: getattr(objective, key) for key in TRIPLE_LOSS}
    return triple_loss(
        inputs,
        weights=weights,
        positions=objective.kl_positions,
        temperature=objective.temperature,
        divergence=objective.divergence,
    )


def mlm(objective: MaskedLanguageModel, inputs: Inputs) -> dict[str, Tensor]:
    """Compute masked language modelling, as the model itself does when it is given labels."""
    return {"mlm": inputs.student(**inputs.batch._asdict()).loss}


def minilm(objective: MiniLM, inputs: Inputs) -> dict[str, Tensor]:
    """Compute MiniLM 2 (arXiv 2012.15828, section 3), or 1 (arXiv 2002.10957, section 3)."""
    student, teacher = inputs.student, inputs.teacher
    assert teacher is not None
    last = shape_of(student).num_layers - 1
    layer = objective.teacher_layer % shape_of(teacher).num_layers
    first = objective.version == 1
    # Only the two layers that are compared are kept.
    with hooked(student, [last]) as ours, hooked(teacher, [layer]) as theirs:
        outputs = inputs.outputs(output_attentions=True) if first else inputs.outputs()
    keys, means = inputs.batch.attention_mask.bool(), {}
    # With dropout 0 the probabilities are those of the paper; in training some are dropped.
    if first:
        q, p = outputs[0].attentions[last], outputs[1].attentions[layer]
        means["attention"] = divergence(q, p, keys) / keys.sum()
    heads = objective.num_heads(shape_of(student), shape_of(teacher))
    kinds = {"values": "value"} if first else {"queries": "query", "keys": "key", "values": "value"}
    for name, kind in kinds.items():
        x, tx = ours[kind, last], theirs[kind, layer]
        q, p = (relation(each, each, keys[:, None], heads) for each in (x, tx))
        means[name] = divergence(q, p, keys) / keys.sum()
    return means


def tinybert(objective: TinyBert, inputs: Inputs) -> dict[str, Tensor]:
    """Compute general distillation (arXiv 1909.10351, section 3.1) with the authors' clamp."""
    student, teacher = inputs.student, inputs.teacher
    assert teacher is not None
    layers = objective.layer_map(shape_of(student), shape_of(teacher))
    mapped = zip(*layers, strict=True)
    with hooked(student, next(mapped)) as s, hooked(teacher, next(mapped)) as t:
        outputs = inputs.outputs(output_hidden_states=True)
    tokens = inputs.batch.attention_mask.bool()
    terms: dict[str, list[Tensor]] = {"attention": [], "hidden": [], "embedding": []}
    # Of transformers' hidden states the first is the output of the embeddings.
    for here, there in ((-1, -1), *layers):
        if objective.attention and here >= 0:
            heads, pairs = shape_of(teacher).num_heads, tokens[:, :, None] & tokens[:, None, :]
            ours, theirs = (
                scores(found["query", layer], found["key", layer], heads)
                for found, layer in ((s, here), (t, there))
            )
            terms["attention"].append(squared_difference(ours, theirs, pairs) / pairs.sum())
        name = "embedding" if here < 0 else "hidden"
        if getattr(objective, name):
            adapted = inputs.adapters["hidden"](outputs[0].hidden_states[here + 1])
            target = outputs[1].hidden_states[there + 1]
            terms[name].append(nn.MSELoss()(selected(adapted, tokens), selected(target, tokens)))
    return {name: torch.stack(means).sum() for name, means in terms.items() if means}


def embedding(objective: Embedding, inputs: Inputs) -> dict[str, Tensor]:
    """Compare the mean-pooled vectors of sequences, as sentence-transformers makes them."""
    student, teacher = inputs.outputs()
    mask_BL1 = inputs.batch.attention_mask[:, :, None]
    ours_BW, theirs_BW = (
        (each.last_hidden_state * mask_BL1).sum(1) / mask_BL1.sum(1) for each in (student, teacher)
    )
    if "dense" in inputs.adapters:
        ours_BW = inputs.adapters["dense"](ours_BW)
    means = {}
    if objective.cosine:
        means["cosine"] = (1 - F.cosine_similarity(ours_BW, theirs_BW)).mean()
    if objective.similarity:
        # Of pairs of documents of a row, and each has one here.
        means["similarity"] = torch.zeros_like(ours_BW.sum())
    if objective.mse:
        means["mse"] = nn.MSELoss()(ours_BW, theirs_BW)
    return means


FORMULATIONS: Mapping[type[Objective], Formulation] = {
    DistilBert: distilbert,
    MaskedLanguageModel: mlm,
    MiniLM: minilm,
    TinyBert: tinybert,
    Embedding: embedding,
}


def formulation(objective: Objective) -> Formulation:
    """Return the formulation of an objective, or raise RunError."""
    found = FORMULATIONS.get(type(objective))
    if found is None:
        raise RunError(
            f"objective {type(objective).__name__}: distil bench has no plain formulation to "
            "compare it with; add one to pretrain/bench/plain.py"
        )
    return found


def baseline_step(
    student: MaskedLM,
    teacher: MaskedLM | None,
    batch: Padded,
    objective: Objective,
    precision: Precision,
    adapters: nn.ModuleDict,
) -> BaselineStep:
    """Return the baseline step of an objective."""
    terms = objective.terms(*shapes_of(student, teacher))
    weights = {term.name: term.weight(0) for term in terms}
    losses = partial(formulation(objective), objective)
    return BaselineStep(student, teacher, batch, losses, weights, precision, adapters)


@contextmanager
def hooked(model: MaskedLM, layers: Iterable[int]) -> Iterator[dict[tuple[str, int], Tensor]]:
    """Yield a dictionary that a call of the model fills.

    Its keys are ("query", "key" or "value", layer), its values [B, L, D].

    Raises:
        RunError: the model has one linear layer for all three, and rotates query and key later.
    """
    family = family_of(model)
    if not isinstance(family, PostNorm):
        raise RunError(
            f"distil bench: no hook sees query and key of a {family.model_type}, so there is no "
            "plain formulation to compare with; take a BERT, DistilBERT or RoBERTa"
        )
    found: dict[tuple[str, int], Tensor] = {}

    def keep(key: tuple[str, int], _: nn.Module, __: Any, output: Tensor) -> None:
        found[key] = output

    handles = []
    for layer in layers:
        parts = family.parts(model, layer)
        for kind in ("query", "key", "value"):
            module: nn.Module = getattr(parts, kind)
            handles.append(module.register_forward_hook(partial(keep, (kind, layer))))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
