"""What `distil bench` measures: models and rows that are drawn, or those of a config."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from data_prep.shards import load_manifest, open_shards
from launch.bench import Settings, Subject
from pretrain import RunError
from pretrain.bench import cells, subjects
from pretrain.bench.documents import LAYOUTS, Document, SpecialIds, batch, drawn, packed, typical
from pretrain.bench.sizes import Sizes
from pretrain.config import RunConfig
from pretrain.data.batch import MicroBatch
from pretrain.data.rows import build_masking
from pretrain.model.encoder import recompute_activations
from pretrain.model.student import build_student
from pretrain.model.teacher import load_teacher
from pretrain.objectives.distilbert import DistilBert
from pretrain.objectives.terms import Term

_DOCUMENTS = 2000  # drawn for a layout


def synthetic(sizes: Sizes, device: torch.device, settings: Settings) -> Subject:
    """Random weights of these sizes and random rows."""
    special = SpecialIds(subjects.PAD, subjects.CLS, subjects.SEP)
    student, teacher = subjects.models(sizes)
    masking = subjects.masking(sizes)

    def rows(size: int) -> MicroBatch:
        whole = drawn([sizes.length] * size, sizes.vocabulary, special)
        return batch([[document] for document in whole], sizes.length, masking, special)

    def documents(size: int) -> dict[str, dict[str, MicroBatch]]:
        found = {}
        for name, layout in LAYOUTS.items():
            lengths = layout.lengths(_DOCUMENTS, sizes.length, seed=0)
            pieces = drawn(lengths, sizes.vocabulary, special)
            found[name] = {
                "packed": batch(packed(pieces, size, sizes.length), sizes.length, masking, special),
                "padded": batch(typical(pieces, size), sizes.length, masking, special),
                "full": rows(size),
            }
        return found

    pair = cells.Pair.of(
        student,
        teacher,
        device,
        settings.precisions,
        pad_id=special.pad,
        compiled=settings.compiled,
    )
    what = (
        f"random weights: {sizes.layers} -> {sizes.layers // 2} layers x {sizes.width}, "
        f"{sizes.vocabulary:,} words; random rows of {sizes.length} tokens"
    )
    return Subject(what, pair, sizes.length, _terms(DistilBert()), rows, documents)


def configured(config: RunConfig, device: torch.device, settings: Settings) -> Subject:
    """Return a config's teacher, new student, objective and shards.

    Raises:
        RunError: it has no teacher, or they do not fit.
        CorpusError: there are no shards.
    """
    objective = config.objective
    if config.teacher is None or not isinstance(objective, DistilBert):
        raise RunError(
            f"objective {objective.name} has no teacher: distil bench measures distillation; "
            "give a config with a teacher, or --synthetic"
        )
    manifest = load_manifest(config.shards)
    shards, length = open_shards(config.shards), manifest.row_length
    if max(settings.micro_batches) > len(shards):
        raise RunError(
            f"--micro-batch {max(settings.micro_batches)}: {config.shards} has {len(shards)} rows"
        )
    same = config.teacher_vocabulary == "same"
    teacher = load_teacher(config.teacher, manifest, same_vocabulary=same)
    student = build_student(config.student, teacher, config.train.seed)
    masking = build_masking(config.masking, config.shards, manifest, config.train.seed)
    ids = manifest.tokenizer.special_ids
    special = SpecialIds(ids.pad, ids.cls, ids.sep)
    # Not the first ones: packing begins with the documents that fill rows of their own.
    numbers = np.random.default_rng(0).permutation(len(shards))

    def read(size: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        return np.asarray(shards.rows(numbers[:size]), dtype=np.int64)

    def rows(size: int) -> MicroBatch:
        whole = read(size)
        inner = whole == special.cls
        inner[:, 0] = False
        whole[inner] = special.sep  # so that a row is one document
        return batch([[row] for row in whole], length, masking, special)

    def documents(size: int) -> dict[str, dict[str, MicroBatch]]:
        together = [_documents(row, special) for row in read(size)]
        alone = [d for row in read(min(len(shards), 20 * size)) for d in _documents(row, special)]
        return {
            "these shards": {
                "packed": batch(together, length, masking, special),
                "padded": batch(typical(alone, size), length, masking, special),
                "full": rows(size),
            }
        }

    pair = cells.Pair.of(
        student,
        teacher.model,
        device,
        settings.precisions,
        pad_id=special.pad,
        compiled=settings.compiled,
    )
    if config.train.activation_checkpointing:
        recompute_activations(student)
    sizes = teacher.model.config
    what = (
        f"{objective.name}: {sizes.num_hidden_layers} -> {student.config.num_hidden_layers} layers "
        f"x {sizes.hidden_size}, {sizes.vocab_size:,} words; rows of {length} tokens from the "
        f"config's shards, digest {manifest.digest[:16]}"
    )
    return Subject(what, pair, length, _terms(objective), rows, documents)


def _documents(row: Document, special: SpecialIds) -> list[Document]:
    """Return a row's tokens, without padding."""
    tokens = row[row != special.pad]
    return [d for d in np.split(tokens, np.flatnonzero(tokens == special.cls)) if len(d)]


def _terms(objective: DistilBert) -> Callable[[str], Sequence[Term]]:
    return lambda kl: objective.model_copy(update={"kl_positions": kl}).terms()
