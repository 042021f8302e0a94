"""Measure models on the examples of a task, with intervals of a bootstrap over the examples.

Shapes: R rows or pairs, L row length, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from data_prep.messages import warn
from data_prep.shards import Manifest, ShardSet, check, open_shards
from data_prep.shards.manifest import EXAMPLES, Split
from pretrain import RunError
from pretrain.device.gpu import check_kernels
from pretrain.evaluation.encoders import load_encoder, unit
from pretrain.model.config_file import read_config
from pretrain.model.families import MaskedLM
from pretrain.model.folder import Loaded, read_model
from pretrain.model.loading import check_row_length
from pretrain.model.session import Session, model_folder
from pretrain.model.task_head import CLASSES, TaskHead, check_head, labels_of
from pretrain.model.teacher import check_fit
from pretrain.model.vocabulary_file import check_tokenizer
from pretrain.monitor.figures import Figure, interval, resamples, share
from pretrain.run_folder import onnx_file
from pretrain.tasks.labelled.examples import LabelledRows, check_labels, task_head_of
from pretrain.tasks.labelled.prediction import by_length, predict
from pretrain.tasks.task_heads import HEADS, Measured, head_for

MEANINGS = {
    "score": "the figure of the task: its `metric`",
    "accuracy": "share of the examples, or words, whose label is right",
    "f1": "of the second class, or the mean over classes; of answers the words in common",
    "mcc": "Matthews' correlation of labels",
    "pearson": "correlation of the scores with those of the data",
    "spearman": "the same, of ranks",
    "entity f1": "of whole entities, as CoNLL counts them",
    "exact match": "share of the questions whose answer is one of the data's",
    "retention": "the score divided by the teacher's over the same examples; none if that is 0",
}
_FEW = 50  # examples


def evaluate_tasks(
    models: Sequence[str],
    shards: Path,
    *,
    teacher: str | None = None,
    split: Split = "validation",
    same_vocabulary: bool = False,
) -> dict[str, dict[str, Figure]]:
    """Return the figures of models on a task's examples, by name; the teacher's come first.

    Raises:
        RunError, CorpusError: a model has no head for the task, its labels have a different
            order, its tokenizer is not the shards', or the split has no labels.
    """
    manifest = check(shards)
    found: dict[str, dict[str, Figure]] = {}
    theirs: Measured | None = None
    for name in [*([teacher] if teacher is not None else []), *models]:
        if name in found:
            continue
        measured = measure(name, open_shards(shards, split), same_vocabulary=same_vocabulary)
        if measured.size < _FEW and not found:
            warn(f"{shards}: {measured.size} examples of {split}: intervals of so few are wide")
        found[name] = figures(measured, metric_of(manifest))
        if name == teacher:
            theirs = measured
        elif theirs is not None and theirs.score(metric_of(manifest)) > 0:
            found[name]["retention"] = retention(measured, theirs, metric_of(manifest))
    return found


def measure(name: str, shards: ShardSet, *, same_vocabulary: bool = False) -> Measured:
    """Return what a model predicts on a split; see `evaluate_tasks`."""
    rows = LabelledRows(shards)
    if rows.kind not in HEADS:  # similarities, which no model has a head for
        guesses = cosines(load_encoder(name), rows.texts())
        return rows.predicts.measured(rows, rows.columns, guesses[:, None])
    if not rows.labelled:
        raise RunError(f"{shards.folder}: the {shards.split} split has no labels to compare with")
    logits = logits_of(name, rows, same_vocabulary=same_vocabulary)
    return rows.predicts.measured(rows, rows.columns, logits)


def logits_of(
    name: str, rows: LabelledRows, *, same_vocabulary: bool = False
) -> NDArray[np.float32]:
    """Return the logits of a model, or of an ONNX file, for all rows; see `predict`."""
    if (file := onnx_file(Path(name))) is not None:
        check_file_fits(name, model_folder(file), rows.shards.manifest)
        return logits_of_file(Session(file), rows)
    model, head = load_for_task(name, rows, same_vocabulary=same_vocabulary)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_kernels(device)
    torch.nn.Module.to(model, device)
    return predict(model, head.to(device), rows, device)


def check_file_fits(who: str, folder: Path, manifest: Manifest) -> None:
    """Refuse an ONNX file whose head, labels, vocabulary or positions are not the task's.

    Args:
        who: the beginning of a message.
        folder: of the model.
        manifest: of the shards.
    """
    raw, output = read_config(who, folder), HEADS[manifest.kind].output
    check_head(who, raw, output)
    check_labels(who, labels_of(raw, output), manifest.labels)
    check_fit(who, folder, manifest)


def logits_of_file(
    session: Session, rows: LabelledRows, places: NDArray[np.int64] | None = None
) -> NDArray[np.float32]:
    """Return the logits of an ONNX file; see `predict`."""
    shards, pad = rows.shards, rows.special.pad
    places = np.arange(len(shards)) if places is None else places
    outputs = CLASSES[rows.predicts.output].outputs
    if missing := [name for name in outputs if name not in session.outputs]:
        raise RunError(f"{session.file}: has no output {missing[0]}, which the task needs")
    ids_RL, second_R = shards.rows(places).astype(np.int64), rows.columns["second"][places]

    def of_rows(some: NDArray[np.int64]) -> NDArray[np.float32]:
        mask = (ids_RL[some] != pad).astype(np.int64)
        length = mask.sum(1).max()
        ids, mask = ids_RL[some, :length], mask[:, :length]
        types = rows.types(second_R[some], length) * mask
        logits = [session(name, ids, mask, types) for name in outputs]
        return logits[0] if len(outputs) == 1 else np.stack(logits, axis=-1)

    return by_length(ids_RL, pad, of_rows)


def figures(measured: Measured, metric: str) -> dict[str, Figure]:
    """Return all figures with their intervals, the task's first."""
    values = measured.figures(metric)
    drawn = [measured.figures(metric, some) for some in resamples(measured.size)]
    found = {name: interval(value, [one[name] for one in drawn]) for name, value in values.items()}
    # Resamples of a few examples that are nearly all right hardly differ.
    shares = {"exact match", *(["accuracy"] if "mcc" in values else [])} & found.keys()
    shares |= {"score"} if metric in shares else set()
    return found | {name: share(values[name], measured.size) for name in shares}


def retention(ours: Measured, theirs: Measured, metric: str) -> Figure:
    """Return our score divided by the teacher's, which is above 0; both are resampled together."""

    def ratio(some: NDArray[np.int64]) -> float:
        other = theirs.score(metric, some)
        return ours.score(metric, some) / other if other > 0 else np.nan

    return interval(ratio(np.arange(ours.size)), [ratio(some) for some in resamples(ours.size)])


def metric_of(manifest: Manifest) -> str:
    """Return which figure is the score of a task."""
    task = manifest.content[EXAMPLES]["task"]
    return task.get("metric") or head_for(manifest.kind).metric


def load_for_task(
    name: str, rows: LabelledRows, *, same_vocabulary: bool = False
) -> tuple[MaskedLM, TaskHead]:
    """Return a model and its head for a task in fp32; RunError if it does not fit the shards."""
    shards = rows.shards

    def read(loaded: Loaded) -> tuple[MaskedLM, TaskHead]:
        manifest = shards.manifest
        check_tokenizer(
            name,
            loaded.folder,
            loaded.model.config,
            manifest,
            shards.folder,
            required=not same_vocabulary,
        )
        head = task_head_of(name, loaded, rows.predicts.output)
        check_labels(name, head.labels, manifest.labels)
        return loaded.model.eval(), head

    model, head = read_model(name, read, needs_head=False, of_task=True)
    check_row_length(name, model.config, shards.manifest)
    return model, head


def cosines(
    encoder: Callable[[list[str]], Any], pairs: Sequence[Mapping[str, str]]
) -> NDArray[np.float64]:
    """Return the cosine of "text" and "pair" of each entry [R]."""
    texts = [entry[key] for key in ("text", "pair") for entry in pairs]
    both = unit(encoder(texts))
    return (both[: len(pairs)] * both[len(pairs) :]).sum(1)
