"""Find the whole documents of rows, and where their vectors come from: the teacher, or a file."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_prep.shards import Manifest, Segments, ShardSet, open_shards
from pretrain import RunError
from pretrain.config import RunConfig
from pretrain.contracts.batch import Batch, Rows, packed_batch
from pretrain.contracts.terms import Encoded, Shape, TeacherLabels
from pretrain.device.precision import PRECISIONS
from pretrain.model.pooling import SentenceHead
from pretrain.model.sentences import TextEncoder
from pretrain.model.teacher import Teacher
from pretrain.run_folder import VECTORS
from pretrain.tasks.answers import data_sha256
from pretrain.tasks.embedding.documents import Documents
from pretrain.tasks.embedding.vectors import (
    CODE,
    Metadata,
    check_vectors,
    read_record,
    write_vectors,
)
from pretrain.tasks.mlm.masking import Masking
from pretrain.tasks.task import Examples


class WholeDocuments(Examples):
    """Add the whole documents to rows; see `Documents`."""

    def __init__(self, shards: ShardSet, documents: Documents, masking: Masking) -> None:
        super().__init__(shards)
        self.documents, self.masking = documents, masking

    def rows(self, ids: Any, epochs: Any, numbers: Any, step: int = 0, skipped: Any = None) -> Rows:
        """Return rows, masked if the run says so, with their documents."""
        documents = self.documents(ids, numbers, skipped)
        if skipped is not None:
            ids[skipped] = self.special.pad
        found = self.masking(ids, epochs, numbers, step)
        return {"input_ids": torch.from_numpy(found.input_ids), **documents}

    def batch(self, rows: Rows) -> Batch:
        """Return a micro-batch; its counts are of whole documents and of their pairs."""
        labels = {name: tensor for name, tensor in rows.items() if name != "input_ids"}
        return with_documents(
            rows["input_ids"], labels, cls_id=self.special.cls, pad_id=self.special.pad
        )

    def fullest(self, ids: Any, numbers: Any, token: int) -> Batch:
        """Return a micro-batch with the documents that its rows really have."""
        labels = self.documents(self.shards.rows(numbers), numbers)
        return self.batch({"input_ids": torch.from_numpy(ids), **labels})


def drawn_documents(batch: Batch, *, pad_id: int) -> Batch:
    """Return a batch of drawn rows in which every document is a whole one."""
    ids, length, places = batch.input_ids, batch.input_ids.shape[1], Counter[int]()
    documents = torch.full(ids.shape, -1, dtype=torch.int16)
    lengths = torch.zeros(len(ids), len(batch.cu_seqlens), dtype=torch.int16)
    for begin, end in pairwise(batch.cu_seqlens.tolist()):
        row, column = divmod(begin, length)
        if begin < end and ids[row, column] != pad_id:
            documents[row, column : column + end - begin] = places[row]
            lengths[row, places[row]] = end - begin
            places[row] += 1
    lengths = lengths[:, : max(places.values(), default=1)]
    counts = {
        "sequences": sum(places.values()),
        "sequence_pairs": sum(num * (num - 1) for num in places.values()),
    }
    labels = {"documents": documents, "lengths": lengths}
    return batch._replace(labels=labels, counts={**batch.counts, **counts})


def with_documents(
    input_ids: Tensor, labels: Mapping[str, Tensor], *, cls_id: int, pad_id: int
) -> Batch:
    """Return a micro-batch of rows with whole documents; see `packed_batch`."""
    # A pair has two documents of one row, so no sum depends on the size of a micro-batch.
    per_row = np.count_nonzero(labels["lengths"].numpy(), axis=1)
    counts = {
        "sequences": int(per_row.sum()),
        "sequence_pairs": int((per_row * (per_row - 1)).sum()),
    }
    return packed_batch(input_ids, labels, counts, cls_id=cls_id, pad_id=pad_id)


def vectors_by(head: SentenceHead) -> TeacherLabels:
    """Return a function that makes the teacher's vectors of its output on a batch."""

    def vectors(teacher: Encoded, batch: Batch) -> dict[str, Tensor]:
        assert batch.packing is not None
        documents, lengths = batch.labels["documents"], batch.labels["lengths"]
        positions = batch.packing.position_ids
        return {"vectors": head(teacher.last_hidden_state, documents, lengths, positions)}

    return vectors


class VectorsOfDocuments(WholeDocuments):
    """Hold the training rows of a run, and where their vectors come from.

    Args:
        config: of the run.
        manifest: of its shards.
        teacher: of the run, if it has one.
        documents: of the training rows.
        masking: of the run.
        width: of a vector.
        normalised: the teacher divides a vector by its length.
        digest: of all that shapes a vector, or of a file of another program.
        made_by: name of the teacher; empty if unknown, or a folder of this machine.
        missing: the file is not written, or not all of it.
    """

    def __init__(
        self,
        config: RunConfig,
        manifest: Manifest,
        teacher: Teacher | None,
        documents: Documents,
        masking: Masking,
        width: int,
        normalised: bool,
        digest: str,
        made_by: str,
        *,
        missing: bool = False,
    ) -> None:
        super().__init__(documents.shards, documents, masking)
        self.config, self.manifest = config, manifest
        self.width, self.normalised, self.digest, self.made_by = width, normalised, digest, made_by
        self.missing = missing
        # A teacher whose vectors a file holds does not run in a step.
        self.runs_teacher = documents.path is None
        self.teacher = teacher
        if teacher is not None and teacher.head is not None and self.runs_teacher:
            self.teacher_labels = vectors_by(teacher.head)

    def __reduce__(self) -> tuple[Any, ...]:
        # A loader's worker needs no teacher.
        return WholeDocuments, (self.shards, self.documents, self.masking)

    def shape(self, teacher: Shape | None) -> Shape:
        """Return the teacher's sizes with the width of its vectors."""
        return (teacher or Shape(0, 0, 0))._replace(vector_size=self.width)

    def identity(self) -> dict[str, str]:
        """Return the digest of the vectors."""
        return {"file of vectors": self.digest}

    def state(self) -> dict[str, Any]:
        """Return what export and a later start must know of the vectors."""
        known = {"name": self.made_by, "digest": self.digest, "normalised": self.normalised}
        return {"vectors": known}

    def changes(self, state: Mapping[str, Any]) -> list[str]:
        """Return whether the vectors come from a different teacher than a checkpoint's."""
        before = (state.get("vectors") or {}).get("digest")
        other = before not in (None, self.digest)
        return ["the sentence vectors are of a different teacher"] if other else []

    def to(self, device: torch.device) -> None:
        """Move the modules behind the teacher's encoder."""
        if self.runs_teacher and self.teacher is not None and self.teacher.head is not None:
            self.teacher.head.to(device)

    def write(self, device: torch.device, precision: str, say: Callable[[str], None]) -> None:
        """Write the file of vectors, or the rest of it; see `write_vectors`."""
        path, teacher = self.documents.path, self.teacher
        assert path is not None and teacher is not None and teacher.head is not None
        model: Any = teacher.model
        model.to(device)
        head, who = teacher.head.to(device), f"teacher {teacher.name}"
        autocast = PRECISIONS[precision].autocast(device)
        encoder = TextEncoder(model, head, who, teacher.tokenizer_json, autocast)
        record = Metadata(
            shards=self.manifest.digest,
            teacher=self.digest,
            name=self.made_by,
            normalised="true" if self.normalised else "",
            code=CODE,
            precision=precision,
        )
        segments = segments_of(self.config, self.manifest)
        write_vectors(path, record, segments, encoder, self.width, say)
        if encoder.num_cut:
            say(
                f"note: {encoder.num_cut:,} documents were cut to {encoder.longest} tokens, as "
                "many as the teacher reads"
            )


def find_vectors(
    config: RunConfig,
    manifest: Manifest,
    teacher: Teacher | None,
    masking: Masking,
    notes: list[str],
    *,
    whole: bool,
) -> VectorsOfDocuments:
    """Return where the run's vectors come from.

    Args:
        config: of the run.
        manifest: of its shards.
        teacher: of the run, if it has one.
        masking: of the run.
        notes: receives how many documents are whole, and how many tokens the teacher reads.
        whole: compare an existing file with its checksum, which reads all of it.

    Raises:
        RunError: the file was made for different shards or a different teacher, neither file nor
            texts exist, or all documents were cut.
    """
    shards, path = open_shards(config.shards), config.vectors
    head = teacher.head if teacher is not None else None
    if path is None and (teacher is None or not teacher.reads_ids):
        path = config.output / VECTORS
    # The same documents are left out whatever the teacher reads.
    documents = Documents(shards, path)
    found = partial(VectorsOfDocuments, config, manifest, teacher, documents, masking)
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
        return found(head.width, head.normalised, digest, name)
    # From here on vectors come from a file, which exists or is written by the first start.
    known = None if teacher is None else _digest(teacher)
    if path.exists():
        record, width = read_record(path, manifest, known)
        if whole:
            check_vectors(path, record, segments_of(config, manifest))
        # A file without a checksum might be replaced between two starts.
        made_by = record.teacher or record.sha256 or data_sha256(path)
        return found(width, record.normalised == "true", made_by, record.name)
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
    return found(head.width, head.normalised, known, name, missing=True)


def segments_of(config: RunConfig, manifest: Manifest) -> dict[str, Segments]:
    """Return the segments of each split of the run's shards."""
    return {name: Segments(open_shards(config.shards, name)) for name in manifest.splits}


def _digest(teacher: Teacher) -> str:
    """Return a hash of all that turns a text into the teacher's vector."""
    assert teacher.head is not None
    tokenizer = teacher.tokenizer_json
    text = hashlib.sha256(tokenizer.encode()).hexdigest() if tokenizer else ""
    parts = (teacher.sha256, teacher.head.digest, teacher.head.longest, text)
    return hashlib.sha256(repr(parts).encode()).hexdigest()
