"""Measure LM heads of ONNX files, and of other models beside them, on padded documents.

Shapes: B documents, L tokens, M masked tokens, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from data_prep.shards import Manifest, open_shards
from pretrain import RunError
from pretrain.contracts.batch import IGNORE
from pretrain.deploy.session import LOGITS, Session, batches, model_folder
from pretrain.model.folder import Loaded, read_model
from pretrain.model.loading import check_row_length, known_family
from pretrain.model.model_files import read_config
from pretrain.model.teacher import check_vocabulary
from pretrain.run_folder import onnx_file
from pretrain.tasks.mlm.examples import MaskedRows, evaluation_masking
from pretrain.tasks.mlm.head_figures import unigram

Logits = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.float32]]


class Masked(NamedTuple):
    """Hold a document whose tokens are partly masked."""

    ids: NDArray[np.int64]
    places: NDArray[np.int64]  # of the masked tokens
    labels: NDArray[np.int64]  # the original ids there


def evaluate_padded(
    models: Sequence[str],
    shards: Path,
    teacher: str | None,
    rows: int,
    *,
    same_vocabulary: bool = False,
) -> dict[str, dict[str, float]]:
    """Evaluate LM heads of ONNX files and other models on padded documents of validation rows.

    The figures are those of `evaluate_folders`: every document is read alone in both.

    Raises:
        RunError: a model has no LM head, or other tokens than the shards.
    """
    split = open_shards(shards, "validation")
    for name in dict.fromkeys([*models, *([teacher] if teacher is not None else [])]):
        if (file := onnx_file(Path(name))) is not None:
            check_fit(name, model_folder(file), split.manifest, required=not same_vocabulary)
        else:

            def fits(loaded: Loaded, name: str = name) -> None:
                check_fit(name, loaded.folder, split.manifest, required=not same_vocabulary)

            read_model(name, fits)
    special = split.manifest.tokenizer.special_ids
    documents = list(masked_documents(shards, np.arange(min(rows, len(split)))))
    labels = np.concatenate([d.labels for d in documents])
    counts = np.bincount(labels, minlength=split.manifest.tokenizer.vocab_size)
    tokens = unigram(split).numpy()

    def log_p(name: str) -> Iterator[NDArray[np.float64]]:
        for logits in logits_at_masks(head_of(name), documents, special.pad):
            wide = logits.astype(np.float64)
            wide -= wide.max(-1, keepdims=True)
            yield wide - np.log(np.exp(wide).sum(-1, keepdims=True))

    found = {}
    for name in models:
        totals: Counter[str] = Counter()
        teachers = log_p(teacher) if teacher is not None else iter(())
        for document, ours in zip(documents, log_p(name), strict=True):
            rows_M = np.arange(len(document.labels))
            guesses = ours.argmax(-1)
            totals["loss"] -= ours[rows_M, document.labels].sum()
            totals["accuracy"] += (guesses == document.labels).sum()
            if teacher is not None:
                theirs = next(teachers)
                totals["kl"] += (np.exp(theirs) * (theirs - ours)).sum()
                totals["agreement"] += (guesses == theirs.argmax(-1)).sum()
                totals["teacher_accuracy"] += (theirs.argmax(-1) == document.labels).sum()
                totals["teacher_loss"] -= theirs[rows_M, document.labels].sum()
        totals["constant_accuracy"] = counts.max()
        totals["unigram_loss"] = counts @ tokens
        num = float(len(labels))
        found[name] = {key: float(value) / num for key, value in totals.items()}
        found[name]["masked_tokens"] = num
    return found


def check_fit(who: str, folder: Path, manifest: Manifest, *, required: bool = True) -> None:
    """Refuse a model whose vocabulary or positions are not those of shards.

    Args:
        who: the beginning of the message.
        folder: of the model.
        manifest: of the shards.
        required: refuse a folder without tokenizer files.
    """
    raw = read_config(who, folder)
    family = known_family(who, raw)
    config = family.completed(family.config.from_dict(raw))
    check_vocabulary(who, folder, config, manifest, required=required)
    check_row_length(who, config, manifest)


def head_of(name: str) -> Logits:
    """Return what gives the logits [B, L, V] of an ONNX file or of another model.

    Raises:
        RunError: it has no LM head, or cannot be read.
    """
    if (file := onnx_file(Path(name))) is not None:
        session = Session(file)
        if LOGITS not in session.outputs:
            raise RunError(f"{name}: has no LM head; its outputs are {sorted(session.outputs)}")
        return lambda ids, mask: session(LOGITS, ids, mask)
    model: Any = read_model(name, lambda loaded: loaded.model.eval())

    @torch.inference_mode()
    def logits(ids: NDArray[np.int64], mask: NDArray[np.int64]) -> NDArray[np.float32]:
        inputs = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
        found: NDArray[np.float32] = model(**inputs).logits.numpy()
        return found

    return logits


def masked_documents(shards: Path, rows: NDArray[np.int64]) -> Iterator[Masked]:
    """Yield the documents of validation rows by their numbers, masked as in `distil evaluate`."""
    split = open_shards(shards, "validation")
    examples = MaskedRows(split, evaluation_masking(split.manifest, 0.15))
    special = split.manifest.tokenizer.special_ids
    for number in rows:
        one = np.array([number])
        found = examples.rows(split.rows(one), np.zeros_like(one), one)
        ids = found["input_ids"][0].numpy().astype(np.int64)
        labels = np.full(len(ids), IGNORE)
        used = found["masked"][0].numpy() != IGNORE
        labels[found["positions"][0].numpy()[used]] = found["masked"][0].numpy()[used]
        num = int((ids != special.pad).sum())
        begins = np.flatnonzero(ids[:num] == special.cls)
        for begin, end in zip(begins, [*begins[1:], num], strict=True):
            places = np.flatnonzero(labels[begin:end] != IGNORE)
            if len(places):
                yield Masked(ids[begin:end], places, labels[begin:end][places])


def logits_at_masks(
    logits: Logits, documents: Sequence[Masked], pad: int
) -> Iterator[NDArray[np.float32]]:
    """Yield the logits [M, V] at the masked tokens of each document, in the order of documents."""
    found: dict[int, NDArray[np.float32]] = {}
    # Blocks of documents, so that logits of all need not be kept.
    for begin in range(0, len(documents), 64):
        block = documents[begin : begin + 64]
        for places, ids, mask in batches([d.ids.tolist() for d in block], pad, values=2**15):
            values = logits(ids, mask)
            for row, place in enumerate(places):
                found[place] = values[row, block[place].places]
        for place in range(len(block)):
            yield found.pop(place)
