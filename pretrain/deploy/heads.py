"""Run LM heads of ONNX files, and of other models beside them, on padded documents.

Shapes: B documents, L tokens, M masked tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from data_prep.shards import Manifest, open_shards
from pretrain import RunError
from pretrain.contracts.batch import IGNORE
from pretrain.deploy.session import LOGITS, Session, batches
from pretrain.model.folder import read_model
from pretrain.model.loading import check_row_length, known_family
from pretrain.model.model_files import read_config
from pretrain.model.teacher import check_tokenizer
from pretrain.run_folder import onnx_file
from pretrain.tasks.mlm.examples import MaskedRows, evaluation_masking

Logits = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.float32]]


class Masked(NamedTuple):
    """Hold a document whose tokens are partly masked."""

    row: int  # number of its row in the split
    ids: NDArray[np.int64]
    places: NDArray[np.int64]  # where the masked tokens are
    labels: NDArray[np.int64]  # the original ids there


def check_fit(
    who: str,
    folder: Path,
    manifest: Manifest,
    *,
    shards: Path | None = None,
    required: bool = True,
) -> None:
    """Refuse a model whose vocabulary or positions are not those of shards; no weights are read.

    Args:
        who: the beginning of the message.
        folder: of the model.
        manifest: of the shards.
        shards: their folder, to compare the two tokenizers on a text.
        required: refuse a folder without tokenizer files.
    """
    raw = read_config(who, folder)
    family = known_family(who, raw)
    config = family.completed(family.config.from_dict(raw))
    check_tokenizer(who, folder, config, manifest, shards, required=required)
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
                yield Masked(int(number), ids[begin:end], places, labels[begin:end][places])


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
