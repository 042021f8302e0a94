"""Write a model with fewer heads and neurons, chosen by their importance or a baseline of it.

No class of transformers loads layers of different sizes, or fewer heads of the same width. So all
layers keep as many neurons, and a head that goes becomes zeros: its query, key and value, and what
reads it. Their gradients are then zero, too, so that it stays out when the model is trained on.

    score = mean over documents of | sum over tokens of a * dL/da |

a is the output of an attention head, or the activation of a neuron (Michel et al. 2019, arXiv
1905.10650). L is a sum over documents of

    labels        the task's own loss, of a corpus that of masked tokens
    divergence    KL(q || p) of the whole model, q, and of what is left, p: TextPruner (Yang et al.
                  2022, arXiv 2203.15996)
    drawn         CE(p, y) of labels y that are drawn from q: while p = q, KL has no gradient

A score z is the mean of a normal distribution of variance 1: KL = (z - z')^2 / 2. TextPruner takes
|.| of a batch, so that its scores depend on the batch's size.

Shapes: N layers, A heads, F neurons, T tokens, S documents, U units of a layer, E examples, P
tokens of the longest, R outputs, C classes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from data_prep.shards import Manifest, ShardSet, open_shards
from pretrain import RunError
from pretrain.contracts.batch import IGNORE, PLACES, Batch, apart
from pretrain.contracts.packing import document_numbers, find_documents
from pretrain.device.gpu import check_kernels
from pretrain.model import tokenizer_files
from pretrain.model.config_file import read_config
from pretrain.model.cut import Cuts, cut_into, rows_of, ways
from pretrain.model.distillation import TYPES
from pretrain.model.families import FAMILIES, encode, family_of
from pretrain.model.folder import Loaded, read_model
from pretrain.model.loading import check_row_length
from pretrain.model.task_head import TaskHead, check_head, with_head
from pretrain.model.vocabulary_file import check_tokenizer
from pretrain.shrink.smaller import write_smaller
from pretrain.tasks.labelled.examples import LabelledRows, check_labels, task_head_of
from pretrain.tasks.mlm.examples import MaskedRows, evaluation_masking
from pretrain.tasks.task import Examples
from pretrain.tasks.task_heads import HEADS, head_of


class Units(NamedTuple):
    """Hold a value, or whether it stays, for each head [N, A] and each neuron [N, F]."""

    heads: Tensor
    neurons: Tensor


@torch.no_grad()
def magnitudes(model: PreTrainedModel) -> Units:
    """Return the norm of all weights that make or read a head or a neuron."""

    found = zip(
        *([way.squares().sum(1).sqrt() for way in both] for both in ways(model)), strict=True
    )
    return Units(*(torch.stack(layers).cpu() for layers in found))


@torch.no_grad()
def pruned_model(model: PreTrainedModel, kept: Units) -> PreTrainedModel:
    """Return a model of the same class with the kept neurons, as many in each layer.

    The heads that are not kept are zeros.
    """
    config = copy.deepcopy(model.config)
    name = FAMILIES[config.model_type].own_names.get("intermediate_size", "intermediate_size")
    setattr(config, name, int(kept.neurons[0].sum()))
    found = type(model)(config)
    cuts: Cuts = {}
    for (_, neurons), stay in zip(ways(model), kept.neurons, strict=True):
        cuts |= neurons.cuts(stay)
    cut_into(model, found, cuts)
    for (heads, _), stay in zip(ways(found), kept.heads, strict=True):
        gone = heads.numbers(~stay)
        heads.reads.weight[:, gone] = 0
        for linear in heads.makes:
            for parameter in linear.parameters():
                parameter[rows_of(linear, gone)] = 0
    return found.eval()


Importance = Literal["self-supervised", "labels", "magnitude", "random"]
_MASKED = 0.15  # share of a corpus's tokens
_TOLERANCE = 1e-5  # relative to the largest output: the products have other sizes


def prune(
    name: str,
    shards: Path,
    folder: Path,
    *,
    heads: int | None,
    intermediate_size: int | None,
    even_heads: bool,
    importance: Importance,
    rounds: int,
    documents: int,
    seed: int,
    say: Callable[[str], None],
) -> None:
    """Write `folder`: the model `name` with its most important heads and neurons.

    Args:
        name: of the model.
        shards: of its task, or a corpus for a masked language model.
        folder: missing or empty.
        heads, intermediate_size: that stay in a layer, heads on average; None: all.
        even_heads: as many heads in each layer.
        importance: what chooses them; magnitude and random read no rows.
        rounds: of choice, each by scores of what is left.
        documents: rows that are read.
        seed: of which rows, and of what is drawn.
        say: receives lines for the screen.

    Raises:
        RunError: the model does not fit the shards, or what is read back differs.
        OSError: the disk is full or read-only.
    """
    rows, tokenizer = calibration(name, open_shards(shards), documents, seed)
    if importance == "labels" and not getattr(rows.examples, "labelled", True):
        raise RunError(f"{shards}: has no labels; take importance self-supervised")
    model, every = rows.model, magnitudes(rows.model)
    # A head of zeros was pruned before.
    kept = Units(every.heads > 0, torch.ones_like(every.neurons, dtype=torch.bool))
    depth, size = kept.neurons.shape
    there = int(kept.heads.sum())
    if heads is not None and depth * heads > there:
        raise RunError(
            f"heads {heads}: {name} has {there} of {kept.heads.numel()} heads left, "
            f"{there / depth:.3g} in a layer; take no more"
        )
    targets = (there, depth * heads if heads else there), (size, intermediate_size or size)
    draw = torch.Generator().manual_seed(seed)
    rounds = rounds if importance in ("self-supervised", "labels") else 1
    for number in range(1, rounds + 1):
        if importance == "magnitude":
            found = every
        elif importance == "random":
            found = Units(*(torch.rand(x.shape, generator=draw) for x in every))
        elif importance == "labels":
            found = scores(rows, kept, "labels")
        else:
            found = scores(rows, kept, "drawn" if number == 1 else "divergence")
        num_heads, num_neurons = (n - (n - to) * number // rounds for n, to in targets)
        kept = Units(
            best_heads(found.heads, kept.heads, num_heads, even=even_heads),
            best(found.neurons, kept.neurons, num_neurons),
        )
        say(f"round {number} of {rounds}: {num_heads:,} heads, {num_neurons:,} neurons a layer")
    for part in (model, rows.head):
        if part is not None:
            part.cpu()
    small = pruned_model(model, kept)
    say(f"outputs differ by at most {compare(rows, kept, small):.1e} of the largest")
    both = [with_head(m, rows.head) if rows.head is not None else m for m in (model, small)]
    left = " and ".join(
        f"{int(stay.sum()):,} of {stay.numel():,} {what}"
        for stay, what in zip(kept, ("heads", "neurons"), strict=True)
    )
    how = {"magnitude": "the size of weights", "random": f"chance, with seed {seed}"}.get(
        importance,
        f"{importance} importance in {rounds} rounds, with seed {seed} on {len(rows.numbers):,} "
        f"rows of shards `{rows.examples.shards.manifest.digest}`",
    )
    how = f"What is left was chosen by {how}. Heads that went are zeros here; "
    how += "`distil export --onnx` leaves them out."
    rest: dict[str, Any] = {"tokenizer": tokenizer, "modules": {}, "name": name}
    write_smaller(folder, *both, **rest, left=left, how=how, say=say)


def check_kind(who: str, folder: Path, manifest: Manifest, shards: Path) -> None:
    """Refuse a model's folder whose head is not for the shards; RunError says what would be."""
    raw = read_config(who, folder)
    if manifest.kind in HEADS:
        check_head(who, raw, HEADS[manifest.kind].output)
        return
    name = str((raw.get("architectures") or [""])[0])
    if manifest.kind or not name.endswith("ForMaskedLM"):
        raise RunError(
            f"{who}: is a {name}, and {shards} holds {manifest.kind or 'a corpus'}: give a masked "
            "language model and a corpus, or a model with a head and the examples of its task"
        )


def calibration(
    name: str, shards: ShardSet, documents: int, seed: int
) -> tuple[Calibration, dict[str, bytes]]:
    """Return a model with rows to score it on, on a GPU if there is one, and its tokenizer."""
    manifest = shards.manifest
    of_task = HEADS.get(manifest.kind)
    if manifest.kind and of_task is None:
        raise RunError(
            f"{shards.folder}: holds {manifest.kind}, whose models have no head to prune"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_kernels(device)
    numbers = np.random.default_rng(seed).permutation(len(shards))[:documents]

    def read(loaded: Loaded) -> tuple[Calibration, dict[str, bytes]]:
        model: Any = loaded.model.eval().requires_grad_(False)
        check_tokenizer(name, loaded.folder, model.config, manifest, shards.folder)
        check_row_length(name, model.config, manifest)
        family = family_of(model)
        length, types = family.row_length(model.config), family.has_types(model.config)
        # The shards' is the model's: they were compared.
        tokenizer = tokenizer_files.of_shards(
            shards.folder, manifest, length, types=types and manifest.pairs
        )
        model.to(device)
        if of_task is None:
            examples = MaskedRows(shards, evaluation_masking(manifest, _MASKED))
            return Calibration(model, None, examples, numbers, seed), tokenizer
        head = task_head_of(name, loaded, of_task.output).eval().requires_grad_(False).to(device)
        check_labels(name, head.labels, manifest.labels)
        return Calibration(model, head, LabelledRows(shards), numbers, seed), tokenizer

    task = of_task is not None
    return read_model(name, read, needs_head=not task, of_task=task)


def best(scores: Tensor, kept: Tensor, num: int) -> Tensor:
    """Return so many of the kept units of each row [.., U], those with the highest scores."""
    order = scores.masked_fill(~kept, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    return torch.zeros_like(kept).scatter_(-1, order[..., :num], True) & kept


def best_heads(scores: Tensor, kept: Tensor, num: int, *, even: bool) -> Tensor:
    """Return so many of the kept heads [N, A] in all, at least one in each layer."""
    if even:  # where a round's number does not divide, more stay until the last one
        return best(scores, kept, -(-num // len(kept)))
    ranked = scores.masked_fill(best(scores, kept, 1), torch.inf)
    return best(ranked.flatten(), kept.flatten(), num).view_as(kept)


@torch.no_grad()
def compare(rows: Calibration, kept: Units, small: PreTrainedModel) -> float:
    """Return how far the outputs of the smaller model are from the masked one's.

    Raises:
        RunError: more than rounding can explain.
    """
    batch, _ = next(rows.batches())
    with masked(rows.model, kept):
        one = rows.outputs(batch)
    difference = (one - replace(rows, model=small).outputs(batch)).abs().max()
    most = float(difference / one.abs().max())
    if not most <= _TOLERANCE:
        raise RunError(f"outputs of the pruned model differ by {most:.1e}; report it")
    return most


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
            there = self.slots(batch).sum(1).tolist()
            drawn = np.concatenate([u[:num] for u, num in zip(draws, there, strict=True)])
            yield batch, torch.from_numpy(drawn).to(self.model.device)

    def outputs(self, batch: Batch) -> Tensor:
        """Return the outputs of the model [R, C]: logits of distributions, or scores."""
        model, labels = self.model, batch.labels
        encoded = encode(model, batch.input_ids, batch.packing, types=labels.get(TYPES))
        hidden = encoded.last_hidden_state
        if self.head is None:
            there = self.slots(batch)
            place = labels["positions"].long()[there]
            projection = family_of(model).projection(model, hidden[there.nonzero()[:, 0], place])
            tokens = self.examples.shards.manifest.tokenizer.vocab_size
            return F.linear(*projection.first(tokens))
        logits = self.head(*apart(hidden, labels[PLACES]))
        return head_of(labels).outputs(logits, labels[PLACES] >= 0)

    def slots(self, batch: Batch) -> Tensor:
        """Return which slots of each row are an output."""
        labels = batch.labels
        if self.head is None:
            return labels["masked"] != IGNORE
        return head_of(labels).slots(labels[PLACES] >= 0)

    def targets(self, batch: Batch) -> Tensor:
        """Return the label of each output; IGNORE or NaN is none."""
        labels = batch.labels
        if self.head is None:
            return labels["masked"][self.slots(batch)]
        return head_of(labels).targets(labels, labels[PLACES] >= 0)

    def loss(self, kind: Loss, p: Tensor, q: Tensor | None, batch: Batch, drawn: Tensor) -> Tensor:
        """Return the sum of the losses of outputs p; labels need no q of the whole model."""
        labels = self.targets(batch)
        scores = labels.is_floating_point()
        if kind == "labels":
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


@contextmanager
def masked(model: Any, kept: Units) -> Iterator[list[Tensor]]:
    """Let a model have only its kept heads and neurons.

    Yields a list to which a forward pass appends, for each layer, the outputs of its heads, then of
    its neurons, each [.., U, width of a unit].
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
