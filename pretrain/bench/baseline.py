"""Compute each objective as one would write it with transformers: what `distil bench` compares.

A baseline sums the means of an objective's terms with their weights, runs the backward pass, and
reads each term back with `.item()`. Both models are called as they are, with padded sequences of
one document each and a 2-D mask. Hidden states and attention probabilities come from
`output_hidden_states` and `output_attentions`; query, key and value, which transformers does not
return, from forward hooks on their linear layers. Every tensor exists in full. Attention is torch's
`sdpa`, the default of transformers, and `eager` only where probabilities are asked for, which no
other returns.

There are two baselines. "usual" is the form of Hugging Face's distillation code, with torch's
layers. "careful" computes logits only where a loss reads them, copies none of them, and has our
layers, so both its library of matrix products and ours are the same.

A new objective is a function here and a line in `USUAL`; and one in `CAREFUL` if a careful reader
would compute its terms in another way.

Shapes: B sequences, L length, V vocabulary, D width, A heads, N selected positions.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pretrain import RunError
from pretrain.contracts.batch import IGNORE, Batch
from pretrain.contracts.terms import Shape
from pretrain.device.precision import PRECISIONS, Precision
from pretrain.kernels.cpu_layers import linear, use_cpu_layers, use_torch_layers
from pretrain.model.families import MaskedLM, family_of, shape_of
from pretrain.model.families.post_norm import PostNorm
from pretrain.objectives.distilbert import DistilBert
from pretrain.objectives.embedding import Embedding
from pretrain.objectives.minilm import MiniLM, divergence, relation
from pretrain.objectives.mlm import MaskedLanguageModel
from pretrain.objectives.objective import Objective
from pretrain.objectives.tinybert import TinyBert, scores, squared_difference

Model = TypeVar("Model", bound=MaskedLM)
# The terms of DistilBERT's loss and their weights; the last two are options.
TRIPLE_LOSS = {"kl": 5.0, "mlm": 2.0, "cosine": 1.0, "mse": 0.0, "hidden_mse": 0.0}


class Padded(NamedTuple):
    """Hold sequences as transformers takes them, each [B, L] and int64."""

    input_ids: Tensor  # corrupted
    attention_mask: Tensor  # 1 at tokens, 0 at padding
    labels: Tensor  # -100 where nothing is predicted


class Inputs(NamedTuple):
    """Hold what an objective's formulation reads."""

    student: MaskedLM
    teacher: MaskedLM | None
    batch: Padded
    adapters: nn.ModuleDict

    def outputs(self, *, head: bool = False, **asked: bool) -> tuple[Any, Any]:
        """Call student and teacher, with their LM heads or as `AutoModel` would load them.

        `asked` are arguments of transformers: output_hidden_states, output_attentions.
        """
        found: list[Any] = []
        # The other kinds of attention never compute the probabilities.
        kind = "eager" if asked.get("output_attentions") else "sdpa"
        for model in (self.student, self.teacher):
            if model is None:
                found.append(None)
                continue
            if model.config._attn_implementation != kind:
                model.set_attn_implementation(kind)
            with torch.set_grad_enabled(model is self.student):
                ids, mask, _ = self.batch
                found.append((model if head else model.base_model)(ids, mask, **asked))
        return found[0], found[1]


def padded(batch: Batch, *, pad_id: int) -> Padded:
    """Return the same rows and masks as padded sequences.

    The work is the same only if no row holds two documents.
    """
    positions, masked = (batch.labels[name].long() for name in ("positions", "masked"))
    labels = torch.full_like(batch.input_ids, IGNORE).scatter(1, positions, masked)
    return Padded(batch.input_ids, (batch.input_ids != pad_id).long(), labels)


@dataclass
class BaselineStep:
    """Compute the forward and backward pass of one micro-batch; add gradients to the student's.

    Args:
        student, teacher: see `twin`; the teacher is frozen and in eval mode.
        batch: on their device.
        formulation: returns the mean of each term by name, with its graph.
        weights: of the terms.
        precision: of the forward pass; its loss scale multiplies the loss.
        adapters: of the objective, on the same device.
    """

    student: MaskedLM
    teacher: MaskedLM | None
    batch: Padded
    formulation: Callable[[Inputs], Mapping[str, Tensor]]
    weights: Mapping[str, float]
    precision: Precision = PRECISIONS["fp32"]
    adapters: nn.ModuleDict = field(default_factory=nn.ModuleDict)
    terms: dict[str, float] = field(default_factory=dict)  # means of the last call

    def __call__(self) -> None:
        """Run forward and backward of one micro-batch; gradients add up."""
        with self.precision.autocast(self.batch.input_ids.device):
            means = self.losses()
            loss = torch.stack([self.weights[name] * mean for name, mean in means.items()]).sum()
        (loss * self.precision.loss_scale).backward()
        # Device sync, once a term: the baseline reads its losses, as plain code does.
        self.terms = {name: mean.item() for name, mean in means.items()}

    def losses(self) -> Mapping[str, Tensor]:
        """Return the mean of each term with its graph."""
        return self.formulation(Inputs(self.student, self.teacher, self.batch, self.adapters))

    def encoders(self) -> Any:
        """Return the encoders' outputs alone, which keeps all that their graph holds alive."""
        inputs = Inputs(self.student, self.teacher, self.batch, self.adapters)
        with self.precision.autocast(self.batch.input_ids.device):
            return [each and each.last_hidden_state for each in inputs.outputs()]


def triple_loss(
    inputs: Inputs,
    *,
    weights: Mapping[str, float],
    positions: str = "all",
    temperature: float = 2.0,
    divergence: str = "forward",
) -> dict[str, Tensor]:
    """Return the mean of each term of DistilBERT's loss (arXiv 1910.01108, section 3).

    Args:
        inputs: models and sequences.
        weights: of all terms in `TRIPLE_LOSS`; one of weight 0 is not computed.
        positions: of the terms on distributions: "all" tokens but padding, or "masked" ones.
        temperature: of the divergence.
        divergence: "forward", "reverse" or "js".
    """
    # A term that is left out costs the baseline nothing, either.
    if sum(weights.values()) == weights["mlm"]:  # no other term is computed
        inputs = inputs._replace(teacher=None)
    head = any(weights[name] for name in ("kl", "mlm", "mse"))
    student, teacher = inputs.outputs(head=head, output_hidden_states=True)
    labels, tokens = inputs.batch.labels, inputs.batch.attention_mask.bool()
    chosen = tokens if positions == "all" else labels != IGNORE
    means = {}
    if weights["kl"] or weights["mse"]:
        student_NV = selected(student.logits, chosen)
        teacher_NV = selected(teacher.logits, chosen)
    if weights["kl"]:
        # KLDivLoss(log q, p) is KL(p || q).
        kl_div = nn.KLDivLoss(reduction="batchmean")
        if divergence == "forward":
            log_q = F.log_softmax(student_NV / temperature, dim=-1)
            kl = kl_div(log_q, F.softmax(teacher_NV / temperature, dim=-1))
        elif divergence == "reverse":
            log_p = F.log_softmax(teacher_NV / temperature, dim=-1)
            kl = kl_div(log_p, F.softmax(student_NV / temperature, dim=-1))
        else:
            q, p = (F.softmax(each / temperature, dim=-1) for each in (student_NV, teacher_NV))
            log_middle = ((q + p) / 2).log()
            kl = (kl_div(log_middle, q) + kl_div(log_middle, p)) / 2
        name = {"forward": "kl", "reverse": "reverse_kl", "js": "js"}[divergence]
        means[name] = kl * temperature**2
    if weights["mlm"]:
        means["mlm"] = nn.CrossEntropyLoss(ignore_index=IGNORE)(
            student.logits.flatten(0, 1), labels.flatten()
        )
    # Padding has hidden states, too, which mean nothing.
    if weights["cosine"] or weights["hidden_mse"]:
        student_ND = selected(student.hidden_states[-1], tokens)
        teacher_ND = selected(teacher.hidden_states[-1], tokens)
    if weights["cosine"]:
        same = student_ND.new_ones(len(student_ND))
        means["cosine"] = nn.CosineEmbeddingLoss()(student_ND, teacher_ND, same)
    if weights["mse"]:
        means["mse"] = nn.MSELoss(reduction="sum")(student_NV, teacher_NV) / len(student_NV)
    if weights["hidden_mse"]:
        means["hidden_mse"] = nn.MSELoss()(student_ND, teacher_ND)
    return means


def selected(values_BLX: Tensor, mask_BL: Tensor) -> Tensor:
    """Return a copy of the positions of a mask [N, X]."""
    width = values_BLX.shape[-1]
    return values_BLX.masked_select(mask_BL[:, :, None].expand_as(values_BLX)).view(-1, width)


def shapes_of(student: MaskedLM, teacher: MaskedLM | None) -> tuple[Shape, Shape | None]:
    """Return the sizes of both models, for an objective; sentence vectors are means of tokens."""
    if teacher is None:
        return shape_of(student), None
    theirs = shape_of(teacher)
    return shape_of(student), theirs._replace(vector_size=theirs.hidden_size)


def twin(model: Model, *, torch_layers: bool = True) -> Model:
    """Return the same model and parameters, with torch's layers or with ours.

    It has its own configuration and dropout; weights and their gradients are shared.
    """
    shared: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    other = copy.deepcopy(model, shared)
    (use_torch_layers if torch_layers else use_cpu_layers)(other)
    return other


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


def careful_distilbert(objective: DistilBert, inputs: Inputs) -> dict[str, Tensor]:
    """Compute the triple loss with logits only at the positions of its terms, each once."""
    weights = {key: getattr(objective, key) for key in TRIPLE_LOSS}
    temperature = objective.temperature
    if sum(weights.values()) == weights["mlm"]:  # no other term is computed
        inputs = inputs._replace(teacher=None)
    models: tuple[Any, Any] = inputs.student, inputs.teacher
    outputs = inputs.outputs()
    labels = inputs.batch.labels.flatten()
    tokens = inputs.batch.attention_mask.flatten().nonzero()[:, 0]
    masked = (labels != IGNORE).nonzero()[:, 0]
    divergences = weights["kl"] or weights["mse"]
    chosen = tokens if divergences and objective.kl_positions == "all" else masked
    hidden = [out and out.last_hidden_state.flatten(0, 1) for out in outputs]
    means: dict[str, Tensor] = {}
    if divergences or weights["mlm"]:
        student_NV, teacher_NV = (
            model and logits(model, at(hidden_ND, chosen))
            for model, hidden_ND in zip(models, hidden, strict=True)
        )
    if weights["kl"]:
        log_q, log_p = (F.log_softmax(x / temperature, -1) for x in (student_NV, teacher_NV))
        divergence = partial(F.kl_div, reduction="batchmean", log_target=True)
        if objective.divergence == "forward":
            name, kl = "kl", divergence(log_q, log_p)
        elif objective.divergence == "reverse":
            name, kl = "reverse_kl", divergence(log_p, log_q)
        else:
            log_middle = torch.logaddexp(log_q, log_p) - math.log(2)
            name, kl = "js", (divergence(log_middle, log_q) + divergence(log_middle, log_p)) / 2
        means[name] = kl * temperature**2
    if weights["mlm"]:
        where = (labels[chosen] != IGNORE).nonzero()[:, 0]
        means["mlm"] = F.cross_entropy(at(student_NV, where), labels[masked])
    if weights["cosine"] or weights["hidden_mse"]:
        student_ND, teacher_ND = (at(hidden_ND, tokens) for hidden_ND in hidden)
    if weights["cosine"]:
        means["cosine"] = 1 - F.cosine_similarity(student_ND, teacher_ND).mean()
    if weights["mse"]:
        means["mse"] = F.mse_loss(student_NV, teacher_NV, reduction="sum") / len(chosen)
    if weights["hidden_mse"]:
        means["hidden_mse"] = F.mse_loss(student_ND, teacher_ND)
    return means


def careful_mlm(objective: MaskedLanguageModel, inputs: Inputs) -> dict[str, Tensor]:
    """Compute masked language modelling with logits only where a token is masked."""
    labels = inputs.batch.labels.flatten()
    masked = (labels != IGNORE).nonzero()[:, 0]
    hidden_ND = inputs.outputs()[0].last_hidden_state.flatten(0, 1)
    return {"mlm": F.cross_entropy(logits(inputs.student, hidden_ND[masked]), labels[masked])}


def at(rows_NX: Tensor, positions: Tensor) -> Tensor:
    """Return some rows, without a copy if all are meant."""
    return rows_NX if len(positions) == len(rows_NX) else rows_NX[positions]


def logits(model: MaskedLM, hidden_ND: Tensor) -> Tensor:
    """Return logits [N, V], by the library that computes those of our step."""
    return linear(*family_of(model).projection(model, hidden_ND), kind="head")


USUAL: Mapping[type[Objective], Formulation] = {
    DistilBert: distilbert,
    MaskedLanguageModel: mlm,
    MiniLM: minilm,
    TinyBert: tinybert,
    Embedding: embedding,
}
CAREFUL: Mapping[type[Objective], Formulation] = {
    DistilBert: careful_distilbert,
    MaskedLanguageModel: careful_mlm,
}


def formulation(objective: Objective, *, careful: bool = False) -> Formulation:
    """Return the formulation of an objective, or raise RunError."""
    found = USUAL.get(type(objective))
    if careful:
        found = CAREFUL.get(type(objective), found)
    if found is None:
        raise RunError(
            f"objective {objective.name}: distil bench has no plain formulation to "
            "compare it with; add one to pretrain/bench/baseline.py"
        )
    return found


def baseline_step(
    student: MaskedLM,
    teacher: MaskedLM | None,
    batch: Padded,
    objective: Objective,
    precision: Precision,
    adapters: nn.ModuleDict,
    *,
    careful: bool = False,
) -> BaselineStep:
    """Return the baseline step of an objective."""
    terms = objective.terms(*shapes_of(student, teacher))
    weights = {term.name: term.weight(0) for term in terms}
    losses = partial(formulation(objective, careful=careful), objective)
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
