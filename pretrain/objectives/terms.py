"""Define the loss terms: each formula, the positions of its mean, and the code that computes it.

    loss = sum over terms of  weight * total / count

`total` is the sum of a term's values over one optimizer step and all ranks. `count` is the number
of what the term is `over`: "tokens" (all but padding), "masked" (the selected positions),
"sequences" (documents; of an objective that compares vectors of documents, the whole ones), "pairs"
(of two positions in the same document, in both orders), or "sequence_pairs" (of two whole documents
in the same row, in both orders). A weight is a function of the optimizer step.

The LM head (`kernels/head/vocabulary.py`) computes the vocabulary terms in chunks of positions,
without a tensor of [positions, vocabulary], in one of two ways:

- If each of them names a formula in `fused`, and no two the same one, a backend computes values
  and gradients: `kernels/head/triton_kernel.py` on GPUs of compute capability 8.0 or more,
  `kernels/head/compiled.py` with `train.compile` elsewhere, else `kernels/head/closed_form.py`.
  They compute the formulas below, and `tests/pretrain/test_head*.py` compare each with fp64.
- Otherwise the functions below run with autograd, for all vocabulary terms: one term without
  `fused` is enough. The figures of an evaluation are such terms.

A `SignalTerm` sees the fields of `Encoded`: the last hidden state, and the signals that it names
(outputs of layers, query, key and value). Attention scores are no signal: a term computes them from
query and key, in chunks of rows, so that the fast attention kernels stay on.

All functions compute in fp32 whatever the precision of their inputs (fp64 stays fp64): a bf16
softmax over 30,000 tokens is wrong in the second digit.

Shapes: N positions, V vocabulary, B rows, L row length, D width, K documents of a row, W width of a
sentence vector.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pretrain.kernels.attention import Packing
from pretrain.kernels.relations import relation_divergence, score_difference
from pretrain.model.pooling import Sequences, pooled

Count = Literal["tokens", "masked", "sequences", "pairs", "sequence_pairs"]
COUNTS: tuple[Count, ...] = get_args(Count)
Schedule = Callable[[int], float]  # optimizer step, from 0 -> weight
Kind = Literal["hidden", "query", "key", "value"]


def constant(weight: float) -> Schedule:
    """Return the schedule of a weight that never changes."""
    return lambda step: weight


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def kl_divergence(student_NV: Tensor, teacher_NV: Tensor, *, temperature: float) -> Tensor:
    """Compute T^2 * KL(softmax(teacher / T) || softmax(student / T)) [N].

    L_ce of DistilBERT (arXiv 1910.01108, section 2), after Hinton et al. 2015, section 2: T^2 keeps
    the gradient's size when the temperature T changes. The gradient is T (q - p), where p and q are
    the softmax of the teacher's and the student's logits at temperature T.
    """

    log_p = F.log_softmax(_wide(teacher_NV) / temperature, dim=-1)
    log_q = F.log_softmax(_wide(student_NV) / temperature, dim=-1)
    return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1) * temperature**2


def reverse_kl_divergence(student_NV: Tensor, teacher_NV: Tensor, *, temperature: float) -> Tensor:
    """Compute T^2 * KL(softmax(student / T) || softmax(teacher / T)) [N].

    The student is punished where it is sure and the teacher is not, so it covers fewer tokens.
    """
    return kl_divergence(teacher_NV, student_NV, temperature=temperature)


def js_divergence(student_NV: Tensor, teacher_NV: Tensor, *, temperature: float) -> Tensor:
    """Compute T^2 * (KL(p || m) + KL(q || m)) / 2 [N], where m = (p + q) / 2.

    p and q are the softmax of the teacher's and the student's logits at temperature T. The value is
    at most T^2 log 2.
    """
    log_p = F.log_softmax(_wide(teacher_NV) / temperature, dim=-1)
    log_q = F.log_softmax(_wide(student_NV) / temperature, dim=-1)
    # In logarithms, because p and q underflow where a model is sure.
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    both = log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)
    return both.sum(-1) * (temperature**2 / 2)


def cross_entropy(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """Compute -log softmax(logits)[label] [N], 0 where the label is -100.

    L_mlm of DistilBERT. The gradient is softmax(logits) - onehot(label).
    """
    return F.cross_entropy(_wide(logits_NV), labels_N, reduction="none")


def cosine_distance(student_ND: Tensor, teacher_ND: Tensor) -> Tensor:
    """Compute 1 - cos(student, teacher) [N]: L_cos of DistilBERT, on last hidden states."""
    return 1 - F.cosine_similarity(_wide(student_ND), _wide(teacher_ND), dim=-1)


class VocabularyTerm(NamedTuple):
    """Hold a term whose value at a position depends only on the vocabulary logits there.

    The LM head calls `values` with a chunk of positions: at most 512 on a CPU, 2,048 on a GPU.
    """

    name: str
    weight: Schedule
    over: Count
    # (student's logits [N, V], teacher's or None, labels [N], -100 where nothing is predicted)
    # -> values [N]
    values: Callable[[Tensor, Tensor | None, Tensor], Tensor]
    needs_teacher: bool
    fused: Literal["kl", "cross_entropy"] | None = None  # the LM head computes this formula
    temperature: float = 1.0  # of the fused formula


class Signal(NamedTuple):
    """Name a tensor inside an encoder: the output of a layer, or its query, key or value.

    Query and key are those that attention multiplies, with the heads side by side.
    """

    kind: Kind
    layer: int  # from 0; "hidden" of layer -1 is the output of the embeddings


class Encoded(NamedTuple):
    """Hold the output of a model's encoder for one micro-batch: all that a `SignalTerm` reads."""

    last_hidden_state: Tensor  # [B, L, D], after the encoder's final norm where it has one
    signals: Mapping[Signal, Tensor] = {}  # [B, L, D], those that the terms name


class Batch(NamedTuple):
    """Hold what a `SignalTerm` reads of a micro-batch besides the outputs of both encoders."""

    packing: Packing  # documents and padding
    sequences: Sequences | None = None  # whole documents, of objectives that compare their vectors


class SignalTerm(NamedTuple):
    """Hold a term on the outputs of the encoders, and the signals that it reads of each."""

    name: str
    weight: Schedule
    over: Count
    # (student, teacher or None, batch, the objective's adapters) -> the sum over the micro-batch
    # [], in fp32
    total: Callable[[Encoded, Encoded | None, Batch, nn.ModuleDict], Tensor]
    needs_teacher: bool
    # Named in advance, so that the walk returns these and keeps nothing else.
    student: frozenset[Signal] = frozenset()
    teacher: frozenset[Signal] = frozenset()


Term = VocabularyTerm | SignalTerm


def kl_term(weight: float, *, temperature: float, over: Count = "tokens") -> VocabularyTerm:
    """Return the KL term: student's and teacher's distributions over the vocabulary."""

    def values(student_NV: Tensor, teacher_NV: Tensor | None, labels_N: Tensor) -> Tensor:
        assert teacher_NV is not None
        return kl_divergence(student_NV, teacher_NV, temperature=temperature)

    return VocabularyTerm("kl", constant(weight), over, values, True, "kl", temperature)


def divergence_term(
    weight: float, *, kind: Literal["reverse", "js"], temperature: float, over: Count
) -> VocabularyTerm:
    """Return a term in the place of the KL term; not fused."""
    # Other names than "kl", so that curves of different formulas are never drawn as one.
    name, formula = {
        "reverse": ("reverse_kl", reverse_kl_divergence),
        "js": ("js", js_divergence),
    }[kind]

    def values(student_NV: Tensor, teacher_NV: Tensor | None, labels_N: Tensor) -> Tensor:
        assert teacher_NV is not None
        return formula(student_NV, teacher_NV, temperature=temperature)

    return VocabularyTerm(name, constant(weight), over, values, True)


def mlm_term(weight: float) -> VocabularyTerm:
    """Return the cross-entropy term of the masked tokens."""

    def values(student_NV: Tensor, teacher_NV: Tensor | None, labels_N: Tensor) -> Tensor:
        return cross_entropy(student_NV, labels_N)

    return VocabularyTerm("mlm", constant(weight), "masked", values, False, "cross_entropy")


def cosine_term(weight: float) -> SignalTerm:
    """Return the cosine term: last hidden states of student and teacher."""

    def total(
        student: Encoded, teacher: Encoded | None, batch: Batch, adapters: nn.ModuleDict
    ) -> Tensor:
        assert teacher is not None
        # The mask leaves padding out, whose hidden states mean nothing. `count` is the number of
        # tokens, so this sum becomes the mean over all tokens.
        values_BL = cosine_distance(student.last_hidden_state, teacher.last_hidden_state)
        return (values_BL * batch.packing.token_mask).sum()

    return SignalTerm("cosine", constant(weight), "tokens", total, True)


def mse_term(weight: float, *, over: Count) -> VocabularyTerm:
    """Return the squared distance of the logits, an option of DistilBERT's code; not fused."""

    def values(student_NV: Tensor, teacher_NV: Tensor | None, labels_N: Tensor) -> Tensor:
        assert teacher_NV is not None
        return (_wide(student_NV) - _wide(teacher_NV)).square().sum(-1)

    return VocabularyTerm("mse", constant(weight), over, values, True)


def hidden_mse_term(weight: float) -> SignalTerm:
    """Return the mean squared difference of the last hidden states of student and teacher."""

    def total(
        student: Encoded, teacher: Encoded | None, batch: Batch, adapters: nn.ModuleDict
    ) -> Tensor:
        assert teacher is not None
        ours, theirs = (_wide(model.last_hidden_state) for model in (student, teacher))
        return ((ours - theirs).square().mean(-1) * batch.packing.token_mask).sum()

    return SignalTerm("hidden_mse", constant(weight), "tokens", total, True)


def relation_term(
    name: str, *, heads: int, student: tuple[Signal, Signal], teacher: tuple[Signal, Signal]
) -> SignalTerm:
    """Return the KL term of MiniLM: how a document's tokens are related in both models.

    Args:
        name: of the relation.
        heads: relation heads, which divide both widths.
        student: the two signals of the student whose products are compared.
        teacher: those of the teacher.
    """

    def total(
        ours: Encoded, theirs: Encoded | None, batch: Batch, adapters: nn.ModuleDict
    ) -> Tensor:
        assert theirs is not None
        x, y = (ours.signals[signal] for signal in student)
        tx, ty = (theirs.signals[signal] for signal in teacher)
        packing = batch.packing
        return relation_divergence((x, y), (tx, ty), packing.cu_seqlens, packing.token_mask, heads)

    needs = frozenset(student), frozenset(teacher)
    return SignalTerm(name, constant(1.0), "tokens", total, True, *needs)


def adapted_mse_term(
    name: str, weight: float, *, pairs: Sequence[tuple[Signal, Signal]], adapter: str
) -> SignalTerm:
    """Return the mean squared difference of hidden states, a term of TinyBERT.

    Args:
        name, weight: of the term.
        pairs: a signal of the student and one of the teacher; the sum over pairs is taken.
        adapter: the name of the module that brings the student's to the teacher's width.
    """

    def total(
        student: Encoded, teacher: Encoded | None, batch: Batch, adapters: nn.ModuleDict
    ) -> Tensor:
        assert teacher is not None
        # A mean over the width, as an MSE has it. `count` makes the sum a mean over tokens.
        values_BL = [
            (_wide(adapters[adapter](student.signals[ours])) - _wide(teacher.signals[theirs]))
            .square()
            .mean(-1)
            for ours, theirs in pairs
        ]
        return torch.stack([(x_BL * batch.packing.token_mask).sum() for x_BL in values_BL]).sum()

    needs = frozenset(ours for ours, _ in pairs), frozenset(theirs for _, theirs in pairs)
    return SignalTerm(name, constant(weight), "tokens", total, True, *needs)


def scores_term(weight: float, *, heads: int, layers: Sequence[tuple[int, int]]) -> SignalTerm:
    """Return the mean squared difference of attention scores, a term of TinyBERT.

    Args:
        weight: of the term.
        heads: attention heads of both models.
        layers: one of the student and one of the teacher; the sum over these pairs is taken.
    """
    both = [
        tuple((Signal("query", layer), Signal("key", layer)) for layer in pair) for pair in layers
    ]

    def total(
        student: Encoded, teacher: Encoded | None, batch: Batch, adapters: nn.ModuleDict
    ) -> Tensor:
        assert teacher is not None
        # One layer at a time, so that only its scores are in memory.
        packing, sums = batch.packing, []
        for (query, key), (teacher_query, teacher_key) in both:
            ours = student.signals[query], student.signals[key]
            theirs = teacher.signals[teacher_query], teacher.signals[teacher_key]
            sums.append(
                score_difference(ours, theirs, packing.cu_seqlens, packing.token_mask, heads)
            )
        return torch.stack(sums).sum()

    needs = (frozenset(signal for pair in both for signal in pair[i]) for i in (0, 1))
    return SignalTerm("attention", constant(weight), "pairs", total, True, *needs)


def vectors_term(name: Literal["cosine", "similarity", "mse"], weight: float) -> SignalTerm:
    """Return a term that compares the sentence vectors of whole documents.

    The student's vector is the mean over a document's tokens, through the adapter "dense" if there
    is one. "cosine" is 1 - cos(student, teacher), and "mse" their mean squared difference, each a
    mean over documents. "similarity" compares what a document is similar to: the squared
    difference of cos(a, b) in both models, for the pairs of documents of a row. Pairs across rows
    would make the loss depend on the size of a micro-batch.

    Args:
        name: of the formula.
        weight: of the term.
    """

    def total(
        student: Encoded, teacher: Encoded | None, batch: Batch, adapters: nn.ModuleDict
    ) -> Tensor:
        # The teacher's own are there, too, whether it runs or a file holds them.
        sequences = batch.sequences
        assert sequences is not None and sequences.vectors is not None
        ours_BKW, theirs_BKW = pooled(student.last_hidden_state, sequences), sequences.vectors
        with torch.autocast(ours_BKW.device.type, enabled=False):
            if "dense" in adapters:
                dense: Any = adapters["dense"]
                weight, bias = (t.to(ours_BKW.dtype) for t in (dense.weight, dense.bias))
                ours_BKW = F.linear(ours_BKW, weight, bias)
            theirs_BKW = theirs_BKW.to(ours_BKW.dtype)
            there_BK = sequences.lengths > 0
            if name == "cosine":
                return (cosine_distance(ours_BKW, theirs_BKW) * there_BK).sum()
            if name == "mse":
                return ((ours_BKW - theirs_BKW).square().mean(-1) * there_BK).sum()
            # Small: K is the number of documents of one row.
            units = (F.normalize(vectors, dim=-1) for vectors in (ours_BKW, theirs_BKW))
            ours_BKK, theirs_BKK = (unit @ unit.mT for unit in units)
            # A document is as similar to itself in every model.
            pairs_BKK = (there_BK[:, :, None] & there_BK[:, None]).float().triu(1) * 2
            return ((ours_BKK - theirs_BKK).square() * pairs_BKK).sum()

    over: Count = "sequence_pairs" if name == "similarity" else "sequences"
    return SignalTerm(name, constant(weight), over, total, True)
