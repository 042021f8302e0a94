"""Decide where the sentence vectors of a run come from: its teacher in each step, or a file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from data_prep.shards import Manifest, Segments, open_shards
from pretrain import RunError
from pretrain.config import RunConfig
from pretrain.model.sentences import TextEncoder
from pretrain.model.teacher import Teacher
from pretrain.output import VECTORS
from pretrain.tasks.embedding.documents import Documents
from pretrain.tasks.embedding.vectors import (
    CODE,
    Record,
    check_vectors,
    data_sha256,
    read_record,
    write_vectors,
)


class Targets(NamedTuple):
    """Hold where sentence vectors come from."""

    width: int
    normalised: bool  # the teacher divides a vector by its length
    digest: str  # of all that shapes a vector, or of a file of another program
    name: str  # of the teacher; empty if unknown, or a folder of this machine
    documents: Documents  # of the training rows
    missing: bool = False  # the file is not written, or not all of it


def find_targets(
    config: RunConfig, manifest: Manifest, teacher: Teacher | None, notes: list[str], *, whole: bool
) -> Targets:
    """Return where the run's vectors come from.

    Args:
        config: of the run.
        manifest: of its shards.
        teacher: of the run, if it has one.
        notes: receives how many documents are whole, and how many tokens the teacher reads.
        whole: compare an existing file with its checksum, which reads all of it.

    Raises:
        RunError: the file is of other shards or another teacher, neither file nor texts are there,
            or all documents were cut.
    """
    shards, path = open_shards(config.shards), config.vectors
    head = teacher.head if teacher is not None else None
    if path is None and (teacher is None or not teacher.reads_ids):
        path = config.output / VECTORS
    # The same documents are left out whatever the teacher reads.
    documents = Documents(shards, path)
    num_whole, num_segments = documents.count()
    if num_whole == 0:
        raise RunError(
            f"{config.shards}: all its documents were cut to fit rows of {manifest.row_length} "
            "tokens; prepare it with a longer row_length, or with short documents: kind text with "
            "`document: line` or `paragraph` (kind sentences joins lines up to the row length)"
        )
    notes.append(
        f"examples are {num_whole:,} documents of at most {manifest.row_length} tokens; "
        f"{num_segments - num_whole:,} pieces of longer ones are left out"
    )
    if path is None:
        # It reads whole documents, as the student does.
        assert teacher is not None and head is not None
        if head.longest is not None and head.longest < manifest.row_length:
            notes.append(
                f"the teacher reads whole documents here, and its folder says at most "
                f"{head.longest} tokens"
            )
        digest, name = teacher.sha256 + head.digest, teacher.public_name
        return Targets(head.width, head.normalised, digest, name, documents)
    # From here on a file: one that is there, or one that the first start writes.
    known = None if teacher is None else _digest(teacher)
    if path.exists():
        record, width = read_record(path, manifest, known)
        if whole:
            check_vectors(path, record, segments_of(config, manifest))
        # A file without a checksum might be replaced between two starts.
        made_by = record.teacher or record.sha256 or data_sha256(path)
        return Targets(width, record.normalised == "true", made_by, record.name, documents)
    if teacher is None or head is None or known is None:
        raise RunError(
            f"vectors {path}: there is no such file; check the path, or add the `teacher:` whose "
            "vectors are then written there"
        )
    if not manifest.has_texts:
        raise RunError(
            f"teacher {teacher.name}: it reads texts, because its vectors are written to a file "
            f"({teacher.mismatch or 'the key vectors names one'}), and {config.shards} keeps none; "
            "prepare the corpus with keep_text: true, or with the teacher's tokenizer"
        )
    if not teacher.tokenizer_json:
        raise RunError(
            f"teacher {teacher.name}: it has no tokenizer.json; save its tokenizer there with "
            "save_pretrained"
        )
    name = teacher.public_name
    return Targets(head.width, head.normalised, known, name, documents, missing=True)


def segments_of(config: RunConfig, manifest: Manifest) -> dict[str, Segments]:
    """Return the segments of each split of the run's shards."""
    return {name: Segments(open_shards(config.shards, name)) for name in manifest.splits}


def write_targets(
    config: RunConfig,
    manifest: Manifest,
    targets: Targets,
    teacher: Teacher,
    device: torch.device,
    autocast: AbstractContextManager[Any],
    say: Callable[[str], None],
) -> None:
    """Write the file of vectors, or the rest of it; see `write_vectors`."""
    path = targets.documents.path
    assert path is not None and teacher.head is not None
    model: Any = teacher.model
    model.to(device)
    head = teacher.head.to(device)
    who = f"teacher {teacher.name}"
    encoder = TextEncoder(model, head, who, teacher.tokenizer_json, autocast)
    record = Record(
        shards=manifest.digest,
        teacher=targets.digest,
        name=targets.name,
        normalised="true" if targets.normalised else "",
        code=CODE,
        precision=config.train.precision,
    )
    write_vectors(path, record, segments_of(config, manifest), encoder, targets.width, say)
    if encoder.num_cut:
        say(
            f"note: {encoder.num_cut:,} documents were cut to {encoder.longest} tokens, as many as "
            "the teacher reads"
        )


def _digest(teacher: Teacher) -> str:
    """Return a hash of all that turns a text into the teacher's vector."""
    assert teacher.head is not None
    tokenizer = teacher.tokenizer_json
    text = hashlib.sha256(tokenizer.encode()).hexdigest() if tokenizer else ""
    parts = (teacher.sha256, teacher.head.digest, teacher.head.longest, text)
    return hashlib.sha256(repr(parts).encode()).hexdigest()
