"""Write a model with fewer heads and neurons, chosen by their importance or a baseline of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from data_prep.shards import Manifest, ShardSet, open_shards
from pretrain import RunError
from pretrain.device.gpu import check_kernels
from pretrain.export.smaller import write_smaller
from pretrain.model import tokenizer_files
from pretrain.model.families import family_of
from pretrain.model.folder import Loaded, read_model
from pretrain.model.loading import check_row_length
from pretrain.model.model_files import read_config
from pretrain.model.prune import Units, magnitudes, pruned_model
from pretrain.model.task_head import check_head, with_head
from pretrain.model.teacher import check_tokenizer
from pretrain.tasks.importance import Calibration, masked, scores
from pretrain.tasks.labelled import OUTPUTS, LabelledRows, check_labels, task_head_of
from pretrain.tasks.mlm.examples import MaskedRows, evaluation_masking

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
    raw, output = read_config(who, folder), OUTPUTS.get(manifest.kind)
    if output is not None:
        check_head(who, raw, output)
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
    output = OUTPUTS.get(manifest.kind)
    if manifest.kind and output is None:
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
        if output is None:
            examples = MaskedRows(shards, evaluation_masking(manifest, _MASKED))
            return Calibration(model, None, examples, numbers, seed), tokenizer
        head = task_head_of(name, loaded, output).eval().requires_grad_(False).to(device)
        check_labels(name, head.labels, manifest.labels)
        return Calibration(model, head, LabelledRows(shards), numbers, seed), tokenizer

    task = output is not None
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
