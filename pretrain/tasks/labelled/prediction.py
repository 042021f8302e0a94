"""Compute the logits of a task for all rows of a split, and keep a teacher's in a file.

    FILE    safetensors: for each split of the shards a tensor [R, C], of tags [R, L, C], of answers
            [R, L, 2], in fp32. The metadata say which shards and which teacher they are of, with a
            checksum of the data.

Shapes: R rows, L row length, C classes.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save
from torch import Tensor

from data_prep.disk import sync, write_file
from data_prep.disk.replacing import writing_to
from data_prep.shards import Manifest
from pretrain import RunError
from pretrain.contracts.batch import PLACES, apart
from pretrain.contracts.packing import find_documents
from pretrain.model.distillation import TYPES
from pretrain.model.families import MaskedLM, encode
from pretrain.model.task_head import TaskHead
from pretrain.tasks.answers import data_sha256, map_answers, read_answers
from pretrain.tasks.task_heads import HEADS

if TYPE_CHECKING:
    from pretrain.tasks.labelled.examples import LabelledRows


ROWS = 32  # at a time
CODE = "2"  # raised when the same teacher and rows would give other logits, or another file
_AGAIN = "remove it, or name another file in `task.logits`, which is then written"


def predict(
    model: MaskedLM,
    head: TaskHead,
    rows: LabelledRows,
    device: torch.device,
    together: int = ROWS,
) -> NDArray[np.float32]:
    """Return the logits of all rows, in fp32: [R, C], of tags [R, L, C], of answers [R, L, 2].

    It computes `together` rows at a time.
    """
    shards, pad = rows.shards, rows.special.pad
    ids = shards.rows(np.arange(len(shards)))

    def logits_of(some: NDArray[np.int64]) -> NDArray[np.float32]:
        batch = rows.batch(rows.rows(ids[some], None, some)).to(device)
        # The longest first, as they are given: the batch is in their order.
        assert np.array_equal(batch.labels["number"].cpu().numpy(), some)
        packing = find_documents(batch.input_ids, batch.cu_seqlens, batch.max_length, pad_id=pad)
        output = encode(model, batch.input_ids, packing, types=batch.labels.get(TYPES))
        logits: Tensor = head(*apart(output.last_hidden_state, batch.labels[PLACES]))
        return logits.float().cpu().numpy()

    with torch.inference_mode():
        return by_length(ids, pad, logits_of, together)


def by_length(
    ids: NDArray[Any],
    pad: int,
    logits_of: Callable[[NDArray[np.int64]], NDArray[np.float32]],
    together: int = ROWS,
) -> NDArray[np.float32]:
    """Return the logits of rows, computed a few at a time, longest first.

    Args:
        ids: of the rows [R, L].
        pad: the id of padding.
        logits_of: returns the logits of the rows at some places [N]: [N, C], or of tokens
            [N, l, C], where l is at most L. The rest of a row is 0.
        together: so many at a time.
    """
    found: NDArray[np.float32] | None = None
    # Rows of a like length together: little padding.
    order = np.argsort(-np.count_nonzero(ids != pad, axis=1), kind="stable")
    for begin in range(0, len(order), together):
        some = order[begin : begin + together]
        logits = logits_of(some)
        if found is None:
            shape = ids.shape if logits.ndim == 3 else ids.shape[:1]
            found = np.zeros((*shape, logits.shape[-1]), dtype=np.float32)
        if logits.ndim == 3:
            found[some, : logits.shape[1]] = logits
        else:
            found[some] = logits
    assert found is not None
    return found


def write_logits(
    path: Path,
    splits: Mapping[str, LabelledRows],
    model: MaskedLM,
    head: TaskHead,
    teacher: str,
    device: torch.device,
    say: Callable[[str], None],
) -> None:
    """Write a teacher's logits of all splits, and read the file back.

    Args:
        path: the file; a killed call leaves none.
        splits: rows by split.
        model, head: of the teacher.
        teacher: its digest.
        device: that computes.
        say: receives a line for each split.
    """
    tensors = {}
    for name, rows in splits.items():
        say(f"{path}: the teacher's logits of {len(rows.ids):,} {name} rows")
        tensors[name] = predict(model, head, rows, device)
    manifest = next(iter(splits.values())).shards.manifest
    known = {"shards": manifest.digest, "teacher": teacher, "code": CODE}
    data = save(tensors, metadata={**known, "sha256": "0" * 64})
    body = memoryview(data)[8 + int.from_bytes(data[:8], "little") :]
    data = save(tensors, metadata={**known, "sha256": hashlib.sha256(body).hexdigest()})
    temporary = path.with_name(
        f".{path.name}.{uuid.uuid4().hex[:8]}"
    )  # a name that only this process uses
    with writing_to(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(temporary, lambda file: file.write(data))
        os.replace(temporary, path)
        sync(path.parent)
    check_logits(path, manifest, teacher)


def check_logits(path: Path, manifest: Manifest, teacher: str | None) -> str:
    """Compare a file with the shards, the teacher and its checksum; return its teacher's digest.

    Raises:
        RunError: it cannot be read, or is of different shards or a different teacher, or damaged.
    """
    known, shapes = read_answers(path, "logits", manifest, teacher, _AGAIN)
    if not known.get("teacher") or shapes.keys() != manifest.splits.keys():
        raise RunError(f"{path}: names no teacher, or has other splits than the shards; {_AGAIN}")
    if known.get("code") != CODE:
        raise RunError(f"{path}: a different version of this program wrote it; {_AGAIN}")
    head = HEADS[manifest.kind]
    for split, sizes in manifest.splits.items():
        length = [manifest.row_length] if head.by_token else []
        wanted = ("F32", [sizes.rows, *length, head.width(manifest.labels)])
        if shapes.get(split) != wanted:
            dtype, shape = shapes.get(split, ("nothing", []))
            raise RunError(
                f"{path}: tensor {split} is {shape} of {dtype}, and must be {wanted[1]} of F32; "
                f"{_AGAIN}"
            )
        if not np.isfinite(map_answers(path, split)).all():
            raise RunError(f"{path}: logits of {split} are not finite; {_AGAIN}")
    if known.get("sha256") != data_sha256(path):
        raise RunError(f"{path}: is damaged: its checksum differs; {_AGAIN}")
    return str(known["teacher"])
