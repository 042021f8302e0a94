"""Read the rows of a task's shards with their labels: what all tasks with a head share.

A row is one example. The rows of a step are the order's. A micro-batch has their tokens without
padding, as one packed row; only the head, behind the encoder, takes them apart. They are sorted by
length, so that attention meets like lengths together.

Shapes: R or E examples, L row length, P tokens of the longest example, N of all, C classes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from data_prep.shards import Manifest, ShardSet, check_file, open_shards, read_listed
from data_prep.shards.manifest import labels_file, texts_file
from data_prep.shards.reading import map_labels
from pretrain import RunError
from pretrain.contracts.batch import IGNORE, PLACES, Batch, Rows, apart
from pretrain.contracts.terms import Encoded, SignalTerm, TeacherLabels, constant
from pretrain.model.config_file import read_config
from pretrain.model.distillation import TYPES
from pretrain.model.families import MaskedLM
from pretrain.model.folder import Loaded, read_model
from pretrain.model.model_files import read_tensors
from pretrain.model.task_head import (
    Output,
    TaskHead,
    check_head,
    head_tensors,
    labels_of,
    output_of,
    read_task_head,
    saved_head,
)
from pretrain.model.teacher import Teacher
from pretrain.model.tokenizer_files import tells_pairs
from pretrain.tasks.answers import map_answers
from pretrain.tasks.labelled.transfer import Transfer
from pretrain.tasks.task import Examples
from pretrain.tasks.task_heads import head_for, head_of

if TYPE_CHECKING:
    from pretrain.config import RunConfig


class LabelledRows(Examples):
    """Return the rows of a split with their labels.

    Args:
        shards: the split.
        logits: a file with a teacher's logits of these rows; see `prediction.py`.
        transfer: changes the texts; one that differs has no label.
    """

    def __init__(
        self, shards: ShardSet, logits: Path | None = None, transfer: Transfer | None = None
    ) -> None:
        super().__init__(shards)
        self.logits, self.transfer = logits, transfer
        self._mapped: Any = None
        manifest = shards.manifest
        self.kind, self.names = manifest.kind, manifest.labels
        self.predicts = head_for(manifest.kind)
        batches = []
        for shard in manifest.splits[shards.split].shards:
            # The whole file is compared with its hash: labels are small.
            batches.append(map_labels(check_file(shards.folder, manifest, labels_file(shard.file))))
        self.columns: dict[str, Any] = {}
        for name in ("second", "probs", *self.predicts.columns):
            if name in batches[0].schema.names:
                columns = [batch.column(name) for batch in batches]
                self.columns[name] = np.concatenate([_array(column) for column in columns])
        pairs = bool(self.columns["second"].any())
        self.typed = pairs and tells_pairs(shards.folder, manifest)
        self.labelled = bool(self.predicts.labelled(self.columns).any())
        self.ids = [id for batch in batches for id in batch.column("id").to_pylist()]

    def texts(self) -> list[dict[str, Any]]:
        """Return the texts of the examples: "id", "text", "pair" and "answers"."""
        data = read_listed(self.shards.folder, self.shards.manifest, texts_file(self.shards.split))
        return [json.loads(line) for line in data.decode().splitlines()]

    def places(self) -> NDArray[np.int64]:
        """Return which rows have a label."""
        found = self.predicts.labelled(self.columns).numpy()
        return np.flatnonzero(found.any(-1) if found.ndim > 1 else found)

    def __reduce__(self) -> tuple[Any, ...]:
        # A loader's worker reads the labels again.
        return LabelledRows, (self.shards, self.logits, self.transfer)

    def _teacher_logits(self, numbers: Any) -> Any:
        if self._mapped is None:  # written at the start of a run, after this object was made
            assert self.logits is not None
            self._mapped = map_answers(self.logits, self.shards.split)
        return self._mapped[numbers]

    def rows(self, ids: Any, epochs: Any, numbers: Any, step: int = 0, skipped: Any = None) -> Rows:
        """Return rows with their labels, the longest first; without epochs no text changes."""
        head = self.predicts
        columns = {name: values[numbers] for name, values in self.columns.items()}
        if self.logits is not None:
            columns["teacher_logits"] = self._teacher_logits(numbers)
        if skipped is not None:
            ids[skipped] = self.special.pad
            for name, values in columns.items():
                values[skipped] = head.nothing if name in head.columns else 0
        if self.transfer is not None and epochs is not None:
            changed = self.transfer(ids, columns["second"], epochs, numbers)
            columns[head.columns[0]][changed] = head.nothing
        order = np.argsort(-np.count_nonzero(ids != self.special.pad, axis=1), kind="stable")
        found = {"input_ids": ids, "number": np.asarray(numbers, dtype=np.int64), **columns}
        return {name: torch.from_numpy(values[order]) for name, values in found.items()}

    def batch(self, rows: Rows) -> Batch:
        """Return a micro-batch; its count "labelled" is of labelled rows, or of tagged words."""
        ids_EL = rows["input_ids"].numpy()
        token_EL = ids_EL != self.special.pad
        lengths_E = token_EL.sum(1)
        longest = max(1, int(lengths_E.max(initial=0)))
        ends_E = np.cumsum(lengths_E)
        begins_E = ends_E - lengths_E
        index_P = np.arange(longest)
        places = np.where(index_P < lengths_E[:, None], begins_E[:, None] + index_P, -1)
        others = ("input_ids", "number", "second")
        labels = {name: tensor for name, tensor in rows.items() if name not in others}
        for name in labels.keys() & self.predicts.by_token:
            labels[name] = labels[name][:, :longest].contiguous()
        labels |= {"number": rows["number"], PLACES: torch.from_numpy(places)}
        if self.typed:
            types_EL = self.types(rows["second"].numpy(), ids_EL.shape[1])
            labels[TYPES] = torch.from_numpy(types_EL[token_EL][None].astype(np.uint8))
        ids_1N, bounds = ids_EL[token_EL][None], np.append(0, ends_E)
        if not ids_1N.size:  # all are left out: an encoder needs a position
            ids_1N, bounds = np.array([[self.special.pad]], ids_EL.dtype), np.append(bounds, 1)
        there = lengths_E > 0
        counts = {
            "tokens": int(ends_E[-1]),
            "sequences": int(there.sum()),
            "labelled": int(self.predicts.labelled(rows).sum()),
            "pairs": int(np.square(lengths_E).sum()),
        }
        documents = np.stack([begins_E[there], lengths_E[there]], axis=1)
        bounds_S = torch.from_numpy(bounds.astype(np.int32))
        return Batch(torch.from_numpy(ids_1N), bounds_S, longest, labels, counts, documents)

    def types(self, second_E: Any, length: int) -> Any:
        """Return where the tokenizer gives the second text's type [E, L]: some do so nowhere."""
        second_E1 = second_E[:, None]
        return (np.arange(length) >= second_E1) & (second_E1 > 0) & self.typed

    def fullest(self, ids: Any, numbers: Any, token: int) -> Batch:
        """Return rows of the whole length as a micro-batch."""
        return self.batch(self.rows(ids, None, numbers))


class LabelledExamples(LabelledRows):
    """Hold the training rows of a run, and the head of its teacher.

    Args:
        shards: the training split.
        teacher: of the run, if it compares with one.
        head: of that teacher.
        logits: the file that holds its logits, or will; then it does not run in a step.
        transfer: changes the texts.
    """

    def __init__(
        self,
        shards: ShardSet,
        teacher: Teacher | None = None,
        head: TaskHead | None = None,
        logits: Path | None = None,
        transfer: Transfer | None = None,
    ) -> None:
        super().__init__(shards, logits, transfer)
        self.teacher, self.head, self.digest = teacher, head, ""
        if teacher is not None and head is not None:
            weights = {name: t.numpy().tobytes() for name, t in sorted(head.tensors().items())}
            parts = [teacher.sha256, *(hashlib.sha256(w).hexdigest() for w in weights.values())]
            self.digest = hashlib.sha256(" ".join(parts).encode()).hexdigest()
        self.runs_teacher = teacher is not None and logits is None
        if head is not None and self.runs_teacher:
            self.teacher_labels = logits_by(head)
        if logits is not None and logits.is_file():
            from pretrain.tasks.labelled.prediction import check_logits

            self.digest = check_logits(logits, shards.manifest, self.digest or None)
        elif logits is not None:
            self.missing = True

    def identity(self) -> dict[str, str]:
        """Return the digest of the teacher whose logits a file holds."""
        return {"file of logits": self.digest} if self.logits is not None else {}

    def state(self) -> dict[str, Any]:
        """Return what an export, and a later start, must know of the head and of soft labels."""
        known = {"output": self.predicts.output, "names": list(self.names), "pairs": self.typed}
        return {"labels": {**known, "teacher": self.digest}}

    def changes(self, state: Mapping[str, Any]) -> list[str]:
        """Return whether the soft labels come from a different teacher than a checkpoint's."""
        before = (state.get("labels") or {}).get("teacher")
        other = before not in (None, "", self.digest)
        return ["the soft labels are of a different teacher"] if other else []

    def to(self, device: torch.device) -> None:
        """Move the teacher's head."""
        if self.head is not None and self.runs_teacher:
            self.head.to(device)

    def write(self, device: torch.device, precision: str, say: Callable[[str], None]) -> None:
        """Write the file of logits, in fp32; see `write_logits`."""
        from pretrain.tasks.labelled.prediction import write_logits

        teacher, head, path = self.teacher, self.head, self.logits
        assert teacher is not None and head is not None and path is not None
        torch.nn.Module.to(teacher.model, device)
        folder, manifest = self.shards.folder, self.shards.manifest
        splits: dict[str, LabelledRows] = {
            name: LabelledRows(open_shards(folder, name)) for name in manifest.splits
        }
        write_logits(path, splits, teacher.model, head.to(device), self.digest, device, say)
        head.cpu()


def logits_by(head: TaskHead) -> TeacherLabels:
    """Return a function that makes the teacher's logits of its output on a batch."""

    def logits(teacher: Encoded, batch: Batch) -> dict[str, Tensor]:
        # In fp32 also where the encoder is in half precision: a head is small.
        hidden = teacher.last_hidden_state.float()
        with torch.inference_mode(), torch.autocast(hidden.device.type, enabled=False):
            found = head(*apart(hidden, batch.labels[PLACES]))
        return {"teacher_logits": found.clone()}

    return logits


def check_kind(shards: Path, manifest: Manifest, name: str, kinds: Sequence[str]) -> None:
    """Refuse shards that hold no examples of the task; RunError names the fix."""
    kind = manifest.kind
    if kind not in kinds:
        held = f"examples of {kind}" if kind else "a corpus"
        raise RunError(
            f"{shards}: holds {held}, and task {name} needs examples of {' or '.join(kinds)}: "
            "prepare them with a file that has a section task"
        )


def check_labels(who: str, labels: Sequence[str], names: Sequence[str]) -> None:
    """Refuse classes that are not the shards' `names` in their order; RunError has both."""
    if names and tuple(labels) != tuple(names):
        fix = "prepare the shards with task.labels in its order"
        if list(labels) == [f"LABEL_{i}" for i in range(len(labels))]:  # as transformers fills in
            fix = "its config.json names no classes: write its own into id2label and label2id"
        raise RunError(
            f"{who}: its labels are {', '.join(labels)}, those of the shards {', '.join(names)}; "
            f"{fix}"
        )


def load_task_head(who: str, name: str, output: Output) -> TaskHead:
    """Return the trained head of a run, an export or another folder; RunError if it has none."""

    def read(loaded: Loaded) -> TaskHead:
        return task_head_of(who, loaded, output)

    return read_model(name, read, who=who, needs_head=False, of_task=True)


def task_head_of(who: str, loaded: Loaded, output: Output) -> TaskHead:
    """Return the trained head of a loaded model; RunError if it has none."""
    raw = config_of_head(who, loaded.folder, loaded.saved and loaded.saved.state, output)
    return read_task_head(who, raw, _own_tensors(who, loaded), loaded.model, output)


def own_head(who: str, loaded: Loaded) -> TaskHead | None:
    """Return the head of a task that a loaded model has; None of another model."""
    if loaded.saved is not None:
        output = (loaded.saved.state.get("labels") or {}).get("output")
    else:
        output = output_of(read_config(who, loaded.folder))
    return None if output is None else task_head_of(who, loaded, output)


def config_of_head(
    who: str, folder: Path, state: Mapping[str, Any] | None, output: Output
) -> dict[str, Any]:
    """Return what a config.json says of a model's head; RunError if it is of another task.

    A run's checkpoint says it in its `state`.
    """
    if state is None:
        raw = read_config(who, folder)
        check_head(who, raw, output)
        return raw
    labels = state.get("labels")
    if labels is None or labels["output"] != output:
        raise RunError(f"{who}: was trained for a different task, and has no head for this one")
    return {"id2label": dict(enumerate(labels["names"]))}


def _own_tensors(who: str, loaded: Loaded) -> dict[str, Tensor]:
    """Return the weights of a loaded model that are not its encoder's, as transformers names them.

    In a checkpoint the head lies beside the encoder.
    """
    if loaded.saved is not None:
        return saved_head(loaded.saved.adapters())
    return head_tensors(loaded.model, read_tensors(who, loaded.folder, pickled=True))


def first_weights(config: RunConfig, student: MaskedLM, head: TaskHead) -> list[str]:
    """Give a new head the weights that its model's folder has; return the names of the others.

    Of a student that is cut from its teacher these are the teacher's, where both are of one family.
    A head for another task, or for other classes, gives none of its own weights.

    Raises:
        RunError: the model has these classes in a different order.
    """
    init = config.model.init if config.model is not None else None
    if config.model is None:
        init = config.student.init if isinstance(config.student.init, str) else "teacher"
        if init == "random":
            init = None
        elif init == "teacher":
            init = config.teacher

    def read(loaded: Loaded) -> dict[str, Tensor]:
        if loaded.model.config.model_type != student.config.model_type:
            return {}
        tensors = _own_tensors(str(init), loaded)
        if _same_classes(f"model {init}", loaded, head):
            return tensors
        return {n: t for n, t in tensors.items() if not n.startswith(("classifier", "qa_outputs"))}

    tensors = {} if init is None else read_model(init, read, needs_head=False, of_task=True)
    with torch.no_grad():
        return head.load({name: tensor.float() for name, tensor in tensors.items()})


def mean_score(shards: Path) -> float:
    """Return the mean of the training examples' scores; 0 without any."""
    scores = LabelledRows(open_shards(shards)).columns["score"]
    return float(np.nanmean(scores)) if not np.isnan(scores).all() else 0.0


def _same_classes(who: str, loaded: Loaded, head: TaskHead) -> bool:
    """Return whether a model's head predicts the same; RunError for a different order."""
    try:
        state = loaded.saved and loaded.saved.state
        names = labels_of(config_of_head(who, loaded.folder, state, head.output), head.output)
    except RunError:  # its head is for a different task
        return False
    if all(name == f"LABEL_{i}" for i, name in enumerate(names)):  # nobody named them
        return len(names) == len(head.labels)
    if {*names} != {*head.labels}:
        return False
    check_labels(who, names, head.labels)
    return True


def correct_term(chosen_C: Tensor | None = None) -> SignalTerm:
    """Return the number of labelled examples, or words, whose label has the highest logit.

    How often each class is chosen for a labelled example is added to `chosen_C`, on the host.
    """

    def total(
        student: Encoded, teacher: Encoded | None, batch: Batch, adapters: nn.ModuleDict
    ) -> Tensor:
        assert student.task_logits is not None
        labels = batch.labels[head_of(batch.labels).columns[0]]
        guesses = student.task_logits.argmax(-1)
        if chosen_C is not None:
            chosen_C.add_(torch.bincount(guesses[labels != IGNORE].cpu(), minlength=len(chosen_C)))
        return (guesses == labels).float().sum()

    return SignalTerm("accuracy", constant(0.0), "labelled", total, False)


def _array(column: Any) -> Any:
    """Return a copy of a column, [R] or [R, width]."""
    if hasattr(column.type, "list_size"):
        width = column.type.list_size
        return np.from_dlpack(column.flatten()).reshape(-1, width).copy()
    return np.from_dlpack(column).copy()
