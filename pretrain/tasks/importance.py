"""Score the heads and neurons of a model by what a loss would change without them.

    score = mean over documents of | sum over tokens of a * dL/da |

a is the output of an attention head, or the activation of a neuron (Michel et al. 2019, arXiv
1905.10650). L is a sum over documents of

    labels        the task's own loss, of a corpus that of masked tokens
    divergence    KL(q || p) of the whole model, q, and of what is left, p: TextPruner (Yang et al.
                  2022, arXiv 2203.15996)
    drawn         CE(p, y) of labels y that are drawn from q: while p = q, KL has no gradient

A score z is the mean of a normal distribution of variance 1: KL = (z - z')^2 / 2. TextPruner takes
|.| of a batch, so that its scores depend on the batch's size.

Shapes: T tokens, S documents, U units of a layer, E examples, P tokens of the longest, R outputs,
C classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from pretrain.contracts.batch import IGNORE, PLACES, Batch, apart
from pretrain.contracts.packing import document_numbers, find_documents
from pretrain.model.cut import ways
from pretrain.model.distillation import TYPES
from pretrain.model.families import encode, family_of
from pretrain.model.prune import Units
from pretrain.model.task_head import TaskHead
from pretrain.objectives.finetune import answers
from pretrain.tasks.task import Examples

Loss = Literal["labels", "divergence", "drawn"]


@dataclass(frozen=True)
class Calibration:
    """Hold a model, the head of a task or None for its LM head, and rows to score it on.

    Args:
        model, head: in evaluation mode, without gradients, on one device.
        examples: of the split.
        numbers: of the rows.
        seed: of drawn labels.
        together: rows at a time, which no score depends on.
    """

    model: Any
    head: TaskHead | None
    examples: Examples
    numbers: NDArray[np.int64]
    seed: int
    together: int = 32

    def batches(self) -> Iterator[tuple[Batch, Tensor]]:
        """Yield micro-batches, and a number in [0, 1) for each of their outputs [R]."""
        for begin in range(0, len(self.numbers), self.together):
            some = self.numbers[begin : begin + self.together]
            ids = self.examples.shards.rows(some)
            rows = self.examples.rows(ids, np.zeros(len(some), np.int64), some)
            batch = self.examples.batch(rows).to(self.model.device)
            bounds, pad = (batch.cu_seqlens, batch.max_length), self.examples.special.pad
            batch = batch._replace(packing=find_documents(batch.input_ids, *bounds, pad_id=pad))
            # Of each row its own numbers, so that they do not depend on its batch.
            order = rows["number"].tolist() if "number" in rows else some.tolist()
            draws = [np.random.default_rng([self.seed, n]).random(2 + ids.shape[1]) for n in order]
            there = _there(batch, self.head).sum(1).tolist()
            drawn = np.concatenate([u[:num] for u, num in zip(draws, there, strict=True)])
            yield batch, torch.from_numpy(drawn).to(self.model.device)

    def outputs(self, batch: Batch) -> Tensor:
        """Return the outputs of the model [R, C]: logits of distributions, or scores."""
        model, labels, there = self.model, batch.labels, _there(batch, self.head)
        encoded = encode(model, batch.input_ids, batch.packing, types=labels.get(TYPES))
        hidden = encoded.last_hidden_state
        if self.head is None:
            place = labels["positions"].long()[there]
            projection = family_of(model).projection(model, hidden[there.nonzero()[:, 0], place])
            tokens = self.examples.shards.manifest.tokenizer.vocab_size
            return F.linear(*projection.first(tokens))
        logits = self.head(*apart(hidden, labels[PLACES]))
        if self.head.output == "span":
            return answers(logits, labels[PLACES] >= 0).mT.flatten(0, 1)
        return logits[there] if self.head.output == "tags" else logits

    def loss(self, kind: Loss, p: Tensor, q: Tensor | None, batch: Batch, drawn: Tensor) -> Tensor:
        """Return the sum of the losses of outputs p; labels need no q of the whole model."""
        scores = self.head is not None and self.head.output == "score"
        if kind == "labels":
            labels = _labels(batch, _there(batch, self.head))
            if scores:
                return (p[:, 0] - labels).square()[~labels.isnan()].sum()
            return F.cross_entropy(p, labels.long(), reduction="sum")
        assert q is not None
        if scores:
            normal = torch.erfinv(2 * drawn - 1).to(p.dtype)[:, None] * 2**0.5
            return (p - q - normal * (kind == "drawn")).square().sum() / 2
        if kind == "divergence":
            both = p.log_softmax(-1), q.log_softmax(-1)
            return F.kl_div(*both, reduction="sum", log_target=True)
        below = q.double().softmax(-1).cumsum(-1) < drawn[:, None]
        labels = below.sum(-1).clamp(max=q.shape[1] - 1)
        return F.cross_entropy(p, labels, reduction="sum")


def _there(batch: Batch, head: TaskHead | None) -> Tensor:
    """Return which slots of each row are an output."""
    if head is None:
        return batch.labels["masked"] != IGNORE
    places_EP = batch.labels[PLACES]
    if head.output == "tags":
        return places_EP >= 0
    return places_EP.new_ones(len(places_EP), 2 if head.output == "span" else 1).bool()


def _labels(batch: Batch, there: Tensor) -> Tensor:
    """Return the label of each output; IGNORE or NaN is none."""
    labels = batch.labels
    if "start" in labels:
        return torch.stack([labels["start"], labels["end"]], dim=1).flatten()
    tokens = next((labels[name] for name in ("tags", "masked") if name in labels), None)
    if tokens is not None:
        return tokens[there]
    return labels["class"] if "class" in labels else labels["score"].float()


@contextmanager
def masked(model: Any, kept: Units) -> Iterator[list[Tensor]]:
    """Let a model have only its kept heads and neurons.

    Yields what a forward pass appends to: the outputs of the heads of a layer, then its neurons,
    and so on, each [.., U, width of a unit].
    """
    found: list[Tensor] = []

    def hook(mask: Tensor) -> Any:
        # The mask has a gradient, so that its products have one, too; weights need none.
        mask_U1 = mask.float()[:, None].requires_grad_()

        def multiply(_: Any, args: tuple[Tensor]) -> tuple[Tensor]:
            found.append(args[0].unflatten(-1, (len(mask), -1)) * mask_U1)
            return (found[-1].flatten(-2),)

        return multiply

    handles = [
        way.reads.register_forward_pre_hook(hook(mask.to(way.reads.weight.device)))
        for both, *masks in zip(ways(model), *kept, strict=True)
        for way, mask in zip(both, masks, strict=True)
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def scores(rows: Calibration, kept: Units, kind: Loss) -> Units:
    """Return the score of each head and neuron; 0 of those that are not kept."""
    num, sums = 0, [torch.zeros(())] * 2 * len(kept.heads)
    for batch, drawn in rows.batches():
        with torch.no_grad():
            q = None if kind == "labels" else rows.outputs(batch)
        with masked(rows.model, kept) as units:
            loss = rows.loss(kind, rows.outputs(batch), q, batch, drawn)
        index_T = torch.arange(batch.input_ids.numel(), device=batch.input_ids.device)
        document_T = document_numbers(batch.cu_seqlens, index_T)
        for i, gradient in enumerate(torch.autograd.grad(loss, units)):
            effect_TU = (units[i].detach() * gradient).sum(-1).flatten(0, -2)
            effect_SU = effect_TU.new_zeros(len(batch.cu_seqlens), effect_TU.shape[1])
            effect_U = effect_SU.index_add_(0, document_T, effect_TU).abs().sum(0)
            sums[i] = sums[i] + effect_U.cpu()
        num += len(batch.documents)
    return Units(torch.stack(sums[::2]) / num, torch.stack(sums[1::2]) / num)
