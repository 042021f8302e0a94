"""Measure models on the examples of a task, with intervals of a bootstrap over the examples.

Shapes: R rows or pairs, L row length, C classes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from data_prep.messages import warn
from data_prep.shards import Manifest, ShardSet, check, open_shards, read_listed
from data_prep.shards.manifest import EXAMPLES, Split, texts_file
from data_prep.tokens import of_shards
from pretrain import RunError
from pretrain.contracts.batch import IGNORE
from pretrain.device.gpu import check_kernels
from pretrain.evaluation.encoders import load_encoder, unit
from pretrain.model.config_file import read_config
from pretrain.model.families import MaskedLM
from pretrain.model.folder import Loaded, read_model
from pretrain.model.loading import check_row_length
from pretrain.model.session import ENDS, LOGITS, Session, model_folder
from pretrain.model.task_head import TaskHead, check_head, labels_of
from pretrain.model.teacher import check_fit, check_tokenizer
from pretrain.monitor.figures import Figure, interval, resamples, share
from pretrain.run_folder import onnx_file
from pretrain.tasks.labelled.examples import OUTPUTS, LabelledRows, check_labels, task_head_of
from pretrain.tasks.labelled.prediction import by_length, predict
from pretrain.tasks.task_metrics import best_span, counts, exact_match, f1, of_classes, of_scores

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
_SCORES = {
    "accuracy": ("accuracy",),
    "mcc": ("mcc",),
    "f1": ("f1",),
    "f1 and accuracy": ("f1", "accuracy"),
    "pearson and spearman": ("pearson", "spearman"),
    "pearson": ("pearson",),
    "spearman": ("spearman",),
    "entity f1": ("entity f1",),
    "exact match": ("exact match",),
}
_FEW = 50  # examples
_USUAL = {
    "classification": "accuracy",
    "regression": "pearson and spearman",
    "similarity": "pearson and spearman",
    "token_classification": "entity f1",
    "question_answering": "f1",
}


class Measured(NamedTuple):
    """Hold what a model predicted: how to make figures of chosen examples."""

    size: int  # examples
    statistics: Callable[[NDArray[np.int64]], dict[str, float]]

    def score(self, metric: str, some: NDArray[np.int64] | None = None) -> float:
        """Return the score of the task on chosen examples, by default on all."""
        every = np.arange(self.size)
        return with_score(self.statistics(every if some is None else some), metric)["score"]


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
    if rows.kind == "similarity":
        guesses = cosines(load_encoder(name), texts_of(shards))
        return _of_scores(rows.columns["score"], guesses)
    if not rows.labelled:
        raise RunError(f"{shards.folder}: the {shards.split} split has no labels to compare with")
    return measured_by(rows, logits_of(name, rows, same_vocabulary=same_vocabulary))


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


def measured_by(
    rows: LabelledRows, logits: NDArray[np.float32], places: NDArray[np.int64] | None = None
) -> Measured:
    """Return what logits say of the rows at some places, by default of all."""
    if places is not None and len(places) < len(rows.ids):
        columns = {name: values[places] for name, values in rows.columns.items()}
    else:
        columns = rows.columns
    if rows.kind == "regression":
        return _of_scores(columns["score"], logits[:, 0].astype(np.float64))
    if rows.kind == "classification":
        return _of_labels(columns["label"], logits, len(rows.names))
    if rows.kind == "token_classification":
        return _of_tags(columns["tags"], logits, rows.names)
    return _of_answers(rows, logits)


def check_file_fits(who: str, folder: Path, manifest: Manifest) -> None:
    """Refuse an ONNX file whose head, labels, vocabulary or positions are not the task's.

    Args:
        who: the beginning of a message.
        folder: of the model.
        manifest: of the shards.
    """
    raw, output = read_config(who, folder), OUTPUTS[manifest.kind]
    check_head(who, raw, output)
    check_labels(who, labels_of(raw, output), manifest.labels)
    check_fit(who, folder, manifest)


def logits_of_file(
    session: Session, rows: LabelledRows, places: NDArray[np.int64] | None = None
) -> NDArray[np.float32]:
    """Return the logits of an ONNX file; see `predict`."""
    shards, pad = rows.shards, rows.special.pad
    places = np.arange(len(shards)) if places is None else places
    outputs = [LOGITS] if LOGITS in session.outputs else [*ENDS]
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
    values = with_score(measured.statistics(np.arange(measured.size)), metric)
    drawn = [with_score(measured.statistics(some), metric) for some in resamples(measured.size)]
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


def with_score(values: Mapping[str, float], metric: str) -> dict[str, float]:
    """Return figures with the score of the task before them."""
    parts = [values[name] for name in _SCORES[metric]]
    return {"score": sum(parts) / len(parts), **values}


def metric_of(manifest: Manifest) -> str:
    """Return which figure is the score of a task."""
    task = manifest.content[EXAMPLES]["task"]
    return task.get("metric") or _USUAL[manifest.kind]


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
        head = task_head_of(name, loaded, OUTPUTS[rows.kind])
        check_labels(name, head.labels, manifest.labels)
        return loaded.model.eval(), head

    model, head = read_model(name, read, needs_head=False, of_task=True)
    check_row_length(name, model.config, shards.manifest)
    return model, head


def texts_of(shards: ShardSet) -> list[dict[str, Any]]:
    """Return the texts of a split's examples: "id", "text", "pair" and "answers"."""
    data = read_listed(shards.folder, shards.manifest, texts_file(shards.split))
    return [json.loads(line) for line in data.decode().splitlines()]


def _of_labels(labels: Any, logits: Any, num: int) -> Measured:
    there = labels != IGNORE
    given, chosen = labels[there].astype(np.int64), _chosen(logits[there])
    return Measured(len(given), lambda some: of_classes(given[some], chosen[some], num))


def _chosen(logits: Any) -> Any:
    """Return the class with the highest logit; -1 of a model that diverged, which chooses none."""
    return np.where(np.isfinite(logits).all(-1), logits.argmax(-1), -1)


def _of_scores(scores: Any, guesses: Any) -> Measured:
    there = ~np.isnan(scores)
    given, ours = scores[there].astype(np.float64), guesses[there]
    return Measured(len(given), lambda some: of_scores(ours[some], given[some]))


def _of_tags(tags: Any, logits: Any, labels: Sequence[str]) -> Measured:
    chosen, names_of = _chosen(logits), [*labels, "?"]  # the last one stands for no choice
    found, right, words = [], [], []
    for given, ours in zip(tags, chosen, strict=True):
        there = given != IGNORE
        names = [[names_of[i] for i in some[there]] for some in (given, ours)]
        found.append(counts(*names))
        right.append(np.count_nonzero(given[there] == ours[there]))
        words.append(np.count_nonzero(there))
    table, num_right, num_words = np.array(found), np.array(right), np.array(words)

    def statistics(some: NDArray[np.int64]) -> dict[str, float]:
        hits, guessed, known = table[some].sum(0)
        both = guessed + known
        accuracy = num_right[some].sum() / max(1, num_words[some].sum())
        return {"entity f1": 2 * float(hits) / both if both else 0.0, "accuracy": float(accuracy)}

    return Measured(len(table), statistics)


def _of_answers(rows: LabelledRows, logits: Any) -> Measured:
    """Choose the best answer of all rows of a question, and compare it with the data's."""
    shards, known = rows.shards, texts_of(rows.shards)
    # SQuAD 2 has questions without an answer; then nothing may be the best one.
    may_lack = any(example["answers"] == [] for example in known)
    task = shards.manifest.content[EXAMPLES]
    backend = of_shards(shards.folder, shards.manifest).backend
    backend.enable_truncation(task["max_length"], stride=task["stride"], strategy="only_second")
    row, pairs = 0, []
    for example in known:
        encoding = backend.encode(example["text"], example["pair"])
        best, nothing = (-np.inf, ""), np.inf
        for part in (encoding, *encoding.overflowing):
            assert rows.ids[row] == example["id"]
            inside = np.array([number == 1 for number in part.sequence_ids])
            size = len(inside)
            score, first, last = best_span(logits[row, :size, 0], logits[row, :size, 1], inside)
            begin, end = part.offsets[first][0], part.offsets[last][1]
            best = max(best, (score, example["pair"][begin:end].strip()))
            nothing = min(nothing, float(logits[row, 0].sum()))
            row += 1
        if example["answers"] is None:  # it has no label
            continue
        if may_lack and nothing > best[0]:
            best = (nothing, "")
        answers = [text for _, text in example["answers"]]
        pairs.append((exact_match(best[1], answers), f1(best[1], answers)))
    table = np.array(pairs)

    def statistics(some: NDArray[np.int64]) -> dict[str, float]:
        exact, common = table[some].mean(0)
        return {"f1": float(common), "exact match": float(exact)}

    return Measured(len(table), statistics)


def cosines(
    encoder: Callable[[list[str]], Any], pairs: Sequence[Mapping[str, str]]
) -> NDArray[np.float64]:
    """Return the cosine of "text" and "pair" of each entry [R]."""
    texts = [entry[key] for key in ("text", "pair") for entry in pairs]
    both = unit(encoder(texts))
    return (both[: len(pairs)] * both[len(pairs) :]).sum(1)
