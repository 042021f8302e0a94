"""Train and distil tasks, and compare with plain loops of transformers and with formulas."""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from safetensors.torch import load_file
from support import rank_work, ranks, runs, task_data
from support.families import build
from support.results import losses
from support.runs import step_folder
from support.task_data import run_of
from support.tiny import as_teacher
from tokenizers.processors import TemplateProcessing
from torch.nn.functional import cross_entropy, mse_loss
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from data_prep.shards import open_shards
from data_prep.tokens import load
from launch.stages.evaluate import measure
from pretrain.contracts.batch import PLACES, Batch, apart
from pretrain.contracts.terms import Encoded
from pretrain.data.order import Order
from pretrain.evaluation.suite import score_runs
from pretrain.evaluation.tasks import evaluate_tasks
from pretrain.export.asked import Onnx
from pretrain.export.export import export, export_model
from pretrain.model.folder import read_model
from pretrain.model.model_config import Student
from pretrain.model.student import build_student
from pretrain.model.task_head import TaskHead
from pretrain.objectives.finetune import labels_term
from pretrain.objectives.kd import soft_term
from pretrain.tasks.labelled import task as labelled_task
from pretrain.tasks.labelled.examples import LabelledRows, logits_by, task_head_of
from pretrain.tasks.labelled.prediction import predict
from pretrain.tasks.task import Measure
from pretrain.tasks.task_heads import HEADS, head_of

KINDS = ("classification", "regression", "token_classification", "question_answering")
FAMILIES = ("bert", "distilbert", "roberta", "modernbert")
# Each family and each kind once; the pairs that are left are slow.
FAST = {*zip(FAMILIES, KINDS, strict=True)}
PAIRS = [
    pytest.param(family, kind, marks=[] if (family, kind) in FAST else [pytest.mark.slow])
    for family in FAMILIES
    for kind in KINDS
]


def no_dropout(folder: Path) -> dict[str, Any]:
    return {
        "init": str(folder),
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }


def plain_losses(model: Any, values: dict[str, Any], kind: str, types: bool = True) -> list[float]:
    """Train as a user of transformers would, on the rows of each step in one batch."""
    shards, steps = open_shards(values["shards"]), values["train"]["max_steps"]
    columns = LabelledRows(shards).columns
    order = Order(len(shards), values["train"]["global_batch_size"], 0)
    model.train()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() <= 1]},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.0)
    found = []
    for step in range(steps):
        numbers = order.at(step)[1]
        ids = torch.from_numpy(shards.rows(numbers).astype("int64"))
        mask = (ids != 0).long()
        inputs = {"input_ids": ids, "attention_mask": mask}
        second = torch.from_numpy(columns["second"][numbers])[:, None]
        if types and getattr(model.config, "type_vocab_size", 0) > 1:
            place = torch.arange(ids.shape[1])
            inputs["token_type_ids"] = ((place >= second) & (second > 0) & (mask > 0)).long()
        outputs = model(**inputs)
        label = {name: torch.from_numpy(values[numbers]) for name, values in columns.items()}
        if kind == "classification":
            loss = cross_entropy(outputs.logits, label["label"].long())
        elif kind == "regression":
            loss = mse_loss(outputs.logits[:, 0], label["score"])
        elif kind == "token_classification":
            loss = cross_entropy(outputs.logits.flatten(0, 1), label["tags"].long().flatten())
        else:
            hidden = (1 - mask) * -1e30  # transformers lets padding be an answer
            ends = outputs.start_logits + hidden, outputs.end_logits + hidden
            both = [
                cross_entropy(z, label[n].long())
                for z, n in zip(ends, ("start", "end"), strict=True)
            ]
            loss = sum(both) / 2
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        warmup = 2
        rate = (step + 1) / warmup if step < warmup else (steps - step) / (steps - warmup)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * rate
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize(("family", "kind"), PAIRS)
def test_twenty_steps_equal_a_plain_loop(tmp_path: Path, kind: str, family: str) -> None:
    task_data.make(tmp_path, kind)
    model = task_data.save_model(tmp_path / "model", family, kind)
    values = run_of(tmp_path, kind, model=no_dropout(tmp_path / "model"))
    runs.start(values)
    assert [*losses(values).values()] == pytest.approx(plain_losses(model, values, kind), rel=1e-5)


def test_a_micro_batch_is_a_packed_row_of_its_examples(tmp_path: Path) -> None:
    """Count tokens, find each one at its place, and leave rows out, at last all of them."""
    task_data.make(tmp_path, "token_classification")
    examples = LabelledRows(open_shards(tmp_path / "shards"))
    numbers, pad = np.array([7, 2, 40]), examples.special.pad
    ids = examples.shards.rows(numbers)
    for out in ([], [0], [0, 1, 2]):
        skipped = np.isin(np.arange(3), out)
        rows = examples.rows(ids.copy(), None, numbers, 0, skipped)
        batch = examples.batch(rows)
        expected = [row[row != pad].tolist() for row in rows["input_ids"].numpy()]
        lengths = [len(row) for row in expected]
        assert lengths == sorted(lengths, reverse=True) and lengths.count(0) == len(out)
        flat = [token for row in expected for token in row]
        assert batch.input_ids.tolist() == [flat or [pad]]
        places = batch.labels[PLACES]
        assert places.shape == (3, max(1, *lengths)) == batch.labels["tags"].shape
        for row, length, there in zip(expected, lengths, places, strict=True):
            assert batch.input_ids[0, there[:length]].tolist() == row
            assert (there[length:] == -1).all()
        assert batch.counts["tokens"] == len(flat) and batch.counts["sequences"] == 3 - len(out)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_an_example_that_is_left_out_gives_no_nan(pooling: str) -> None:
    """Take ModernBERT's head, whose mean over no token would be 0 / 0."""
    config = build("modernbert").config
    config.classifier_pooling = pooling
    head = TaskHead(config, "score")
    torch.manual_seed(0)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    hidden = torch.randn(2, 3, config.hidden_size, requires_grad=True)
    places = torch.tensor([[0, 1, 2], [-1, -1, -1]])
    logits = head(*apart(hidden.view(1, 6, -1), places))
    logits[0].sum().backward()
    assert logits.isfinite().all() and hidden.grad is not None and hidden.grad.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in head.parameters())


def test_labels_in_another_order_are_other_classes_of_the_same_loss(tmp_path: Path) -> None:
    kind = "classification"
    columns = {"name": kind, "pair": "other", "labels": ["c", "a", "b"]}
    task_data.make(tmp_path, kind, task=columns)
    names = dict(enumerate("cab"))
    model = task_data.save_model(tmp_path / "model", "bert", kind, id2label=names)
    values = run_of(tmp_path, kind, model=no_dropout(tmp_path / "model"))
    runs.start(values)
    assert [*losses(values).values()] == pytest.approx(plain_losses(model, values, kind), rel=1e-5)
    export(Path(values["output"]), tmp_path / "exported", print)
    known = AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported").config
    assert known.id2label == {0: "c", 1: "a", 2: "b"}


# Formulas


def softmax(z: Any) -> Any:
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def test_the_losses_of_labels_equal_their_formulas() -> None:
    draw = np.random.default_rng(0)
    mask = np.arange(6) < np.array([6, 4, 2])[:, None]
    z = draw.normal(size=(3, 4))
    label = np.array([2, -100, 0])
    expected = -sum(np.log(softmax(z[i])[label[i]]) for i in (0, 2))
    assert of_labels(z, mask, {"label": label}) == pytest.approx(expected, rel=1e-12)
    score = np.array([1.5, np.nan, -2.0])
    expected = (z[0, 0] - 1.5) ** 2 + (z[2, 0] + 2) ** 2
    assert of_labels(z[:, :1], mask, {"score": score}) == pytest.approx(expected, rel=1e-12)
    z = draw.normal(size=(3, 6, 4))
    tags = np.where(draw.random((3, 6)) < 0.5, draw.integers(4, size=(3, 6)), -100)
    expected = -sum(
        np.log(softmax(z[i, j])[tags[i, j]]) for i in range(3) for j in range(6) if tags[i, j] >= 0
    )
    assert of_labels(z, mask, {"tags": tags}) == pytest.approx(expected, rel=1e-12)
    z, ends = (
        draw.normal(size=(3, 6, 2)),
        {"start": np.array([1, 3, 0]), "end": np.array([5, 3, 1])},
    )
    expected = 0.0
    for i in range(3):
        for k, name in enumerate(("start", "end")):
            expected -= np.log(softmax(z[i, mask[i], k])[ends[name][i]]) / 2
    assert of_labels(z, mask, ends) == pytest.approx(expected, rel=1e-12)


def of_labels(z: Any, mask: Any, labels: dict[str, Any]) -> float:
    tensors = {name: torch.from_numpy(values) for name, values in labels.items()}
    return head_of(tensors).loss(torch.from_numpy(z), tensors, torch.from_numpy(mask)).item()


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_the_soft_loss_equals_its_formula(temperature: float) -> None:
    draw = np.random.default_rng(1)
    mask = np.arange(6) < np.array([6, 4, 0])[:, None]  # the last row is left out

    def kl(t: Any, s: Any) -> float:
        p, q = softmax(t / temperature), softmax(s / temperature)
        return float(temperature**2 * (p * (np.log(p) - np.log(q))).sum())

    s, t = draw.normal(size=(2, 3, 4))
    expected = sum(kl(t[i], s[i]) for i in (0, 1))
    none = {"label": np.full(3, -100)}
    assert soft(s, mask, temperature, teacher_logits=t, **none) == pytest.approx(
        expected, rel=1e-12
    )
    probs = softmax(t)
    assert soft(s, mask, temperature, probs=probs, **none) == pytest.approx(expected, rel=1e-9)
    expected = sum((s[i, 0] - t[i, 0]) ** 2 for i in (0, 1))
    found = soft(s[:, :1], mask, temperature, teacher_logits=t[:, :1], score=np.zeros(3))
    assert found == pytest.approx(expected, rel=1e-12)
    s, t = draw.normal(size=(2, 3, 6, 4))
    expected = sum(np.mean([kl(t[i, j], s[i, j]) for j in range(n)]) for i, n in ((0, 6), (1, 4)))
    found = soft(s, mask, temperature, teacher_logits=t, tags=np.zeros((3, 6)))
    assert found == pytest.approx(expected, rel=1e-12)
    s, t = draw.normal(size=(2, 3, 6, 2))
    expected = sum(kl(t[i, :n, k], s[i, :n, k]) / 2 for i, n in ((0, 6), (1, 4)) for k in (0, 1))
    found = soft(s, mask, temperature, teacher_logits=t, start=np.zeros(3))
    assert found == pytest.approx(expected, rel=1e-9)


def soft(s: Any, mask: Any, temperature: float, **labels: Any) -> float:
    tensors = {name: torch.from_numpy(values) for name, values in labels.items()}
    tensors[PLACES] = torch.from_numpy(np.where(mask, 0, -1))
    nothing = torch.zeros(0)
    batch = Batch(nothing, nothing, 0, tensors, {}, np.zeros((0, 2), np.int64))
    ours = Encoded(nothing, {}, torch.from_numpy(s))
    term = soft_term(1.0, temperature)
    return term.total(ours, None, batch, torch.nn.ModuleDict()).item()


def test_a_teachers_logits_are_fp32_where_its_encoder_is_not() -> None:
    config = build("bert").config
    head = TaskHead(config, "score").eval()
    torch.manual_seed(0)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    hidden = torch.randn(1, 6, config.hidden_size).bfloat16()
    places, nothing = torch.tensor([[0, 1, 2], [3, 4, -1]]), torch.zeros(0)
    batch = Batch(nothing, nothing, 0, {PLACES: places}, {}, np.zeros((0, 2), np.int64))
    with torch.autocast("cpu", torch.bfloat16):
        found = logits_by(head)(Encoded(hidden, {}, None), batch)["teacher_logits"]
    with torch.no_grad():
        expected = head(*apart(hidden.float(), places))
    assert found.dtype == torch.float32 and torch.equal(found, expected)


# Distillation


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_task_is_distilled(tmp_path: Path, kind: str, precision: str) -> None:
    task_data.make(tmp_path, kind)
    task_data.save_model(tmp_path / "model", "bert", kind)
    none = {"dropout": 0.0, "attention_dropout": 0.0, "architecture": "same", "init": [0, 1]}
    objective = {"name": "kd", "soft": 1.0, "hard": 0.0}
    teacher = str(tmp_path / "model")
    values = run_of(tmp_path, kind, teacher=teacher, objective=objective, student=none)
    values["train"]["precision"] = precision
    runs.start(values, stop_after=1)
    assert losses(values)[1] == pytest.approx(0.0, abs=1e-9 if precision == "fp32" else 2e-2)


def test_soft_labels_of_the_data_need_no_teacher(tmp_path: Path) -> None:
    for name, more in (("train", ""), ("validation", f" {task_data.WORDS[0]}")):
        rows = [{"text": f"{w} {w}{more}", "p": [0.2, 0.8]} for w in task_data.WORDS[:40]]
        lines = "\n".join(map(json.dumps, rows))
        (tmp_path / f"{name}.jsonl").write_text(lines + "\n", encoding="utf-8")
    task = {"name": "classification", "labels": ["no", "yes"], "probabilities": "p"}
    files = {n: str(tmp_path / f"{n}.jsonl") for n in ("train", "validation")}
    task_data.make(tmp_path, "classification", task=task, **files)
    task_data.save_model(tmp_path / "model", "bert", "token_classification")  # another head
    model = no_dropout(tmp_path / "model")
    objective = {"name": "kd", "soft": 1.0, "hard": 0.0, "temperature": 1.0}
    steps = {"max_steps": 60}
    values = run_of(tmp_path, "classification", model=model, objective=objective, train=steps)
    runs.start(values)
    assert losses(values)[60] < losses(values)[1] / 3
    with runs.refused("no training example has a label", "take objective kd"):
        runs.start(values | {"objective": {"name": "finetune"}, "output": str(tmp_path / "hard")})


# What differs between the kinds is the layout of their logits: of examples, or of tokens.
@pytest.mark.parametrize(
    "kind",
    [
        k
        if k in ("classification", "question_answering")
        else pytest.param(k, marks=pytest.mark.slow)
        for k in KINDS
    ],
)
def test_kept_logits_train_as_the_teacher_does(tmp_path: Path, kind: str) -> None:
    """Train with the teacher in each step, with a file that is written, and without the teacher."""
    task_data.make(tmp_path, kind)
    task_data.save_model(tmp_path / "model", "bert", kind)
    none = {"dropout": 0.0, "attention_dropout": 0.0, "architecture": "same", "init": [0]}
    teacher = {"teacher": str(tmp_path / "model"), "student": none}
    steps = {"max_steps": 6, "num_workers": 1}
    values = run_of(tmp_path, kind, **teacher, objective={"name": "kd"}, train=steps)
    runs.start(values)
    file = tmp_path / "kept" / "logits.safetensors"
    kept = {**values, "output": str(tmp_path / "kept-run")}
    kept["task"] = {**values["task"], "logits": str(file)}
    runs.start(kept, stop_after=3)
    written = file.read_bytes()
    runs.start(kept)
    assert file.read_bytes() == written
    assert losses(kept) == pytest.approx(losses(values), rel=1e-5)
    moved = {key: value for key, value in kept.items() if key not in ("teacher", "student")}
    start = read_model(
        str(tmp_path / "model"),
        lambda loaded: build_student(
            Student(**none), as_teacher(loaded.model), 0, needs_head=False, of_task=True
        ),
        needs_head=False,
        of_task=True,
    )
    start.save_pretrained(tmp_path / "start")
    for name in ("vocab.txt", "tokenizer_config.json"):
        shutil.copy(tmp_path / "model" / name, tmp_path / "start")
    moved |= {"model": no_dropout(tmp_path / "start"), "output": str(tmp_path / "moved")}
    runs.start(moved)  # its head is new
    assert len(losses(moved)) == 6

    other = {**kept, "output": str(tmp_path / "other")}
    task_data.save_model(tmp_path / "else", "bert", kind, seed=5)
    with runs.refused("holds logits of a different teacher", "remove it"):
        runs.start({**other, "teacher": str(tmp_path / "else")})
    damaged = bytearray(written)
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    with runs.refused("is damaged: its checksum differs"):
        runs.start(other)
    file.unlink()
    with runs.refused("no such file; name the teacher that writes it"):
        runs.start({**moved, "output": str(tmp_path / "none")})


# Refusals


def test_a_file_of_logits_is_none_of_another_kind(tmp_path: Path) -> None:
    """Name files that are something else, or have other types, shapes or values."""
    kind = "classification"
    shards = task_data.make(tmp_path, kind)
    task_data.save_model(tmp_path / "model", "bert", kind)
    student = {"dropout": 0.0, "attention_dropout": 0.0, "architecture": "same", "init": [0]}
    base = run_of(tmp_path, kind, teacher=str(tmp_path / "model"), student=student)
    base |= {"objective": {"name": "kd"}, "train": {**base["train"], "max_steps": 1}}

    def refused_with(file: Path, *parts: str) -> None:
        task = {**base["task"], "logits": str(file)}
        with runs.refused(*parts):
            runs.start({**base, "task": task, "output": str(tmp_path / "other")})

    file, fifo = tmp_path / "kept.safetensors", tmp_path / "fifo"
    os.umask(mask := os.umask(0o022))
    runs.start({**base, "task": {**base["task"], "logits": str(file)}})
    assert file.stat().st_mode & 0o777 == 0o666 & ~mask
    os.mkfifo(fifo)
    refused_with(fifo, "is not a regular file")
    assert fifo.is_fifo()
    refused_with(shards / "logits.safetensors", "lies in shards", "which the run only reads")
    refused_with(tmp_path / "other" / "config.json", "lies in output", "name a file outside of it")
    with safe_open(file, framework="numpy") as known:
        metadata, good = known.metadata(), {name: known.get_tensor(name) for name in known.keys()}  # noqa: SIM118
    faults: list[tuple[Any, str]] = [
        (good["train"].astype(np.float16), "of F16, and must be [96, 3] of F32"),
        (np.pad(good["train"], ((0, 0), (0, 1))), "is [96, 4] of F32, and must be [96, 3]"),
        (good["train"][1:], "is [95, 3] of F32, and must be [96, 3]"),
        (np.where(np.arange(96)[:, None] == 7, np.nan, good["train"]), "train are not finite"),
        (good["train"] + np.float32(1), "is damaged: its checksum differs"),
    ]
    for values, message in faults:
        save_file({**good, "train": values}, file, metadata=metadata)
        refused_with(file, str(file), message)
    nameless = {key: value for key, value in metadata.items() if key != "teacher"}
    for more, known in (({}, nameless), ({"test": good["train"]}, metadata)):
        save_file({**good, **more}, file, metadata=known)
        refused_with(file, str(file), "names no teacher, or has other splits than the shards")
    file.write_bytes(b"x" * 37)
    refused_with(file, str(file), "is not a safetensors file")


def test_what_does_not_fit_is_refused_before_training(tmp_path: Path, corpus: Path) -> None:
    kind = "classification"
    task_data.make(tmp_path, kind)
    task_data.save_model(tmp_path / "tagger", "bert", "token_classification")
    labels = {0: "c", 1: "b", 2: "a"}
    task_data.save_model(tmp_path / "other", "bert", kind, id2label=labels)
    model = no_dropout(tmp_path / "tagger")
    with runs.refused("holds a corpus", "task classification needs examples of classification"):
        runs.start(run_of(tmp_path, kind, model=model, shards=str(corpus)))
    with runs.refused("holds examples of classification", "token_classification needs"):
        runs.start(run_of(tmp_path, "token_classification", model=model))
    distilled = {"objective": {"name": "kd"}, "student": {"architecture": "same", "init": [0, 1]}}
    with runs.refused("its labels are c, b, a, those of the shards a, b, c"):
        runs.start(run_of(tmp_path, kind, teacher=str(tmp_path / "other"), **distilled))
    labels = {i: f"LABEL_{i}" for i in range(3)}
    task_data.save_model(tmp_path / "nameless", "bert", kind, id2label=labels)
    with runs.refused("its config.json names no classes: write its own into id2label"):
        runs.start(run_of(tmp_path, kind, teacher=str(tmp_path / "nameless"), **distilled))
    with runs.refused("no head for SequenceClassification"):
        runs.start(run_of(tmp_path, kind, teacher=str(tmp_path / "tagger"), **distilled))
    labels_only = distilled | {"objective": {"name": "kd", "soft": 0.0, "hard": 1.0}}
    student = {"architecture": "same", "num_layers": 2, "init": "teacher"}
    with runs.refused("its labels are c, b, a, those of the shards a, b, c"):
        teacher = str(tmp_path / "other")
        runs.start(run_of(tmp_path, kind, teacher=teacher, **labels_only | {"student": student}))
    with runs.refused("its labels are c, b, a, those of the shards a, b, c"):
        runs.start(run_of(tmp_path, kind, model=no_dropout(tmp_path / "other")))
    with runs.refused("holds no probabilities, and there is no teacher"):
        runs.start(run_of(tmp_path, kind, model=model, objective={"name": "kd"}))
    long = task_data.save_model(tmp_path / "short", "bert", kind, max_position_embeddings=16)
    assert long.config.max_position_embeddings == 16
    with runs.refused("need as many positions"):
        runs.start(run_of(tmp_path, kind, model=no_dropout(tmp_path / "short")))


@pytest.mark.parametrize("other", ["a tagger", "other classes", "without names"])
def test_a_head_for_something_else_is_not_taken(other: str, tmp_path: Path) -> None:
    """Its one weight has the same name and shape, and would begin as the wrong classes."""
    task_data.make(tmp_path, "classification")
    kind = "token_classification" if other == "a tagger" else "classification"
    names = {"a tagger": "abc", "other classes": "xyz"}.get(other)
    labels = {i: names[i] if names else f"LABEL_{i}" for i in range(3)}
    task_data.save_model(tmp_path / "model", "bert", kind, id2label=labels)
    values = run_of(tmp_path, "classification", model=no_dropout(tmp_path / "model"))
    runs.start(values, stop_after=1)
    found = load_file(step_folder(values["output"], 1) / "adapters.safetensors")
    model = load_file(tmp_path / "model" / "model.safetensors")
    [weight] = [t for name, t in found.items() if name.endswith("classifier.weight")]
    # A step changes it by 0.001. transformers' own names say nothing of the order.
    kept = (weight - model["classifier.weight"]).abs().max() < 0.01
    assert kept == (other == "without names")


def test_validation_drops_nothing_of_the_head(tmp_path: Path) -> None:
    """Compare the figures before the first step of two runs, one without dropout."""
    kind, found = "classification", []
    task_data.make(tmp_path, kind)
    task_data.save_model(tmp_path / "model", "bert", kind)
    for name, dropout in (("none", 0.0), ("much", 0.5)):
        model = {**no_dropout(tmp_path / "model"), "hidden_dropout_prob": dropout}
        values = run_of(tmp_path, kind, model=model, train={"max_steps": 1})
        values["output"] = str(tmp_path / name)
        runs.start(values)
        entries = runs.history(values["output"])
        found.append(next(entry["labels"] for entry in entries if entry["kind"] == "evaluation"))
    assert found[0] == pytest.approx(found[1], rel=1e-6)


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_only_labelled_rows_are_measured(tmp_path: Path, kind: str) -> None:
    """Let 20 of 24 validation examples lack a label: the first row alone would have a loss of 0."""
    values = task_data.settings(tmp_path, kind)
    with Path(values["validation"]).open(encoding="utf-8", newline="") as file:
        records: list[dict[str, Any]] = list(csv.DictReader(file))
    for number, record in enumerate(records):
        label = float(record["label"]) if kind == "regression" else record["label"]
        record["label"] = None if number < 20 else label
    Path(tmp_path / "v.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    task_data.make(tmp_path, kind, validation=str(tmp_path / "v.jsonl"))
    task_data.save_model(tmp_path / "model", "bert", kind)
    found = []
    for rows in (4, 24):
        run = run_of(tmp_path, kind, model=no_dropout(tmp_path / "model"), train={"max_steps": 1})
        run |= {"output": str(tmp_path / f"{rows}"), "evaluation": {"every": 0, "rows": rows}}
        runs.start(run)
        found.append([e for e in runs.history(run["output"]) if e["kind"] == "evaluation"][-1])
    assert found[0] == found[1] and found[0]["loss"] > 0
    if kind == "classification":
        labels = Counter(record["label"] for record in records[20:])
        assert found[0]["majority"] == max(labels.values()) / 4


# Layouts, kills, exports


# Rows are shared among layouts before a task sees them: one kind finds what goes wrong there.
@pytest.mark.parametrize(
    "kind", [pytest.param("classification", marks=pytest.mark.slow), "question_answering"]
)
def test_all_layouts_give_one_curve(tmp_path: Path, kind: str) -> None:
    task_data.make(tmp_path, kind)
    task_data.save_model(tmp_path / "model", "bert", kind)
    settings = {"model": no_dropout(tmp_path / "model")}
    found = []
    for world, rows in ((1, 12), (1, 3), (2, 3)):
        values = run_of(tmp_path, kind, **settings, train={"micro_batch_size": rows})
        values["output"] = str(tmp_path / f"run-{world}-{rows}")
        ranks.run(world, rank_work.once, values)
        found.append([*losses(values).values()])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[2] == pytest.approx(found[0], rel=1e-5)


def test_weights_only_are_a_third_of_a_checkpoint_and_are_not_continued(tmp_path: Path) -> None:
    kind = "classification"
    task_data.make(tmp_path, kind)
    task_data.save_model(tmp_path / "model", "bert", kind)
    values = run_of(tmp_path, kind, model=no_dropout(tmp_path / "model"), train={"max_steps": 6})
    values["checkpoint"] = {"every": 3, "weights_only": True}
    runs.start(values, stop_after=4)
    runs.start(values)  # continues: only the last one lacks the moments
    whole = {**values, "output": str(tmp_path / "whole"), "checkpoint": {"every": 0}}
    runs.start(whole)
    assert losses(values) == losses(whole)
    folders = [runs.step_folder(v["output"], 6) for v in (values, whole)]
    weights = [(f / "student" / "model.safetensors").read_bytes() for f in folders]
    assert weights[0] == weights[1]
    sizes = [sum(p.stat().st_size for p in f.rglob("*.safetensors")) for f in folders]
    assert sizes[0] < 0.4 * sizes[1]
    assert runs.start(values).ended == "up to date"
    export(Path(values["output"]), tmp_path / "exported", print)


def test_a_run_is_scored_on_the_shards_that_it_was_trained_on(tmp_path: Path) -> None:
    shards, run = task_data.make(tmp_path, "regression"), str(tmp_path / "run")
    task_data.save_model(tmp_path / "model", "bert", "regression")
    model, steps = no_dropout(tmp_path / "model"), {"max_steps": 2}
    runs.start(run_of(tmp_path, "regression", model=model, train=steps))
    found = score_runs({"a": [run]}, "validation", print)
    assert list(found["a"]) == [shards.name]
    shutil.rmtree(shards)
    data = task_data.write_data(tmp_path, "regression", seed=5)
    task_data.make(tmp_path, "regression", train=str(data))
    with runs.refused(f"{run}: was not trained on the shards that {shards} holds now"):
        score_runs({"a": [run]}, "validation", print)
    said: list[str] = []
    measure([run], shards, None, False, None, say=said.append)
    assert f"note: {run} was trained on different shards than {shards} holds now" in said


@pytest.mark.parametrize(("family", "kind"), PAIRS)
def test_an_export_is_what_plain_transformers_loads_and_measures(
    tmp_path: Path, kind: str, family: str
) -> None:
    shards = task_data.make(tmp_path, kind)
    task_data.save_model(tmp_path / "model", family, kind)
    values = run_of(tmp_path, kind, model=no_dropout(tmp_path / "model"), train={"max_steps": 3})
    runs.start(values)
    folder = tmp_path / "exported"
    done = export(Path(values["output"]), folder, print)
    plain: Any = task_data.CLASSES[kind].from_pretrained(folder).eval()
    assert done.architecture == type(plain).__name__ and done.difference < 1e-5
    compare_with_raw_texts(tmp_path, folder, plain, kind)
    run, exported = (
        evaluate_tasks([str(name)], shards)[str(name)] for name in (values["output"], folder)
    )
    assert run == exported
    if kind == "classification":
        last = [line for line in runs.history(values["output"]) if line["kind"] == "evaluation"][-1]
        assert last["accuracy"] == run["accuracy"].value
        assert last["mcc"] == pytest.approx(run["mcc"].value)
        label = LabelledRows(open_shards(shards, "validation")).columns["label"]
        assert last["majority"] == max(Counter(label.tolist()).values()) / len(label)
        card = (folder / "README.md").read_text(encoding="utf-8")
        assert f"| accuracy of the most frequent class alone | {last['majority']:.4f} |" in card
        assert f"| Matthews' correlation | {last['mcc']:.4f} |" in card


def compare_with_raw_texts(tmp_path: Path, folder: Path, plain: Any, kind: str) -> None:
    """Compare logits of rows with those of transformers for texts, by the folder's tokenizer."""
    rows = LabelledRows(open_shards(tmp_path / "shards", "validation"))
    model, head = read_model(
        str(folder),
        lambda loaded: (loaded.model.eval(), task_head_of("it", loaded, HEADS[kind].output)),
        needs_head=False,
        of_task=True,
    )
    ours = predict(model, head, rows, torch.device("cpu"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    source = task_data.write_data(tmp_path, kind, 24, 1)
    for number, texts in enumerate(task_data.texts_of(source)):
        inputs = tokenizer(*texts, return_tensors="pt")
        with torch.no_grad():
            outputs = plain(**inputs)
        length = inputs["input_ids"].shape[1]
        if kind == "question_answering":
            theirs = torch.stack([outputs.start_logits, outputs.end_logits], -1)[0]
        else:
            theirs = outputs.logits[0]
        mine = ours[number][:length] if theirs.dim() == 2 else ours[number]
        np.testing.assert_allclose(mine, theirs.numpy(), atol=2e-5)


def test_types_of_tokens_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    """Train on pairs a RoBERTa with two types, whose tokenizer gives both texts the first one."""
    (tmp_path / "vocab.txt").write_text("\n".join(task_data.VOCABULARY) + "\n", encoding="utf-8")
    backend = load(str(tmp_path / "vocab.txt")).backend
    parts = {"single": "[CLS] $A [SEP]", "pair": "[CLS] $A [SEP] [SEP] $B:0 [SEP]:0"}
    special = [(name, backend.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    backend.post_processor = TemplateProcessing(**parts, special_tokens=special)
    backend.save(str(tmp_path / "tokenizer.json"))
    kind = "classification"
    task_data.make(tmp_path, kind, tokenizer={"path": str(tmp_path / "tokenizer.json")})
    model = task_data.save_model(tmp_path / "model", "roberta", kind, type_vocab_size=2)
    values = run_of(tmp_path, kind, model=no_dropout(tmp_path / "model"))
    runs.start(values)
    wanted = plain_losses(model, values, kind, types=False)
    assert [*losses(values).values()] == pytest.approx(wanted, rel=1e-5)
    folder = tmp_path / "exported"
    export(Path(values["output"]), folder, print)
    compare_with_raw_texts(tmp_path, folder, task_data.CLASSES[kind].from_pretrained(folder), kind)


def other_tasks_are_refused(tmp_path: Path, exported: Path, shards: Path) -> None:
    """Check that files and heads of a classifier are not measured on other tasks."""
    file = str(exported / "onnx" / "model.onnx")
    scores = task_data.make(tmp_path / "regression", "regression")
    for name in (file, str(exported)):
        with runs.refused("it gives 3 classes, and the task is a score"):
            evaluate_tasks([name], scores)
    tags = {"name": "token_classification", "labels": ["a", "b", "c"]}
    data = task_data.write_data(tmp_path, "token_classification")
    text = data.read_text(encoding="utf-8")
    for old, new in (("O", "a"), ("B-X", "b"), ("I-X", "c")):
        text = text.replace(f'"{old}"', f'"{new}"')
    data.write_text(text, encoding="utf-8")
    other = data.with_name("other.jsonl")
    other.write_text("".join(text.splitlines(True)[:12]), encoding="utf-8")
    data.write_text("".join(text.splitlines(True)[12:]), encoding="utf-8")
    files = {"train": str(data), "validation": str(other)}
    tagged = task_data.make(tmp_path / "tags", "token_classification", task=tags, **files)
    for name in (file, str(exported)):
        with runs.refused("which has no head for TokenClassification"):
            evaluate_tasks([name], tagged)
    # The folder is exported again with its head.
    export_model(str(exported), tmp_path / "again", Onnx(), print)
    again = str(tmp_path / "again" / "onnx" / "model.onnx")
    found = evaluate_tasks([file, again], shards)
    assert found[file] == found[again]


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("bert", "classification"),
        ("distilbert", "token_classification"),
        ("roberta", "question_answering"),
        ("modernbert", "regression"),
    ],
)
def test_onnx_files_of_heads_answer_as_pytorch(tmp_path: Path, kind: str, family: str) -> None:
    """Export with int8; the files are measured as models, and by plain transformers."""
    shards = task_data.make(tmp_path, kind)
    layers = 2 if family == "modernbert" else 1  # it has two kinds of them
    task_data.save_model(tmp_path / "model", family, kind, num_hidden_layers=layers)
    values = run_of(tmp_path, kind, model=no_dropout(tmp_path / "model"), train={"max_steps": 3})
    runs.start(values)
    folder, said = tmp_path / "exported", list[str]()
    wanted = Onnx(int8=True, max_drop=0.9, data=shards)
    export(Path(values["output"]), folder, print, onnx=wanted, say=said.append)
    assert "same answers 1.0000" in said[0]
    file = folder / "onnx" / "model.onnx"
    found = evaluate_tasks([str(folder), str(file)], shards)
    ours, theirs = found[str(folder)], found[str(file)]
    assert ours["score"].value == pytest.approx(theirs["score"].value, abs=1e-6)
    session = onnxruntime.InferenceSession(file)
    names = {value.name for value in session.get_inputs()}
    assert ("token_type_ids" in names) == (family == "bert")
    plain: Any = task_data.CLASSES[kind].from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [*map(list, task_data.texts_of(task_data.write_data(tmp_path, kind, 24, 1)))]
    inputs = tokenizer(*zip(*texts, strict=True), return_tensors="np", padding=True)
    inputs = {name: value.astype(np.int64) for name, value in inputs.items() if name in names}
    with torch.no_grad():
        outputs = plain(**{name: torch.from_numpy(value) for name, value in inputs.items()})
    mask = inputs["attention_mask"] == 1
    for output in session.get_outputs():
        mine = session.run([output.name], inputs)[0]
        wanted_logits = getattr(outputs, output.name).numpy()
        if wanted_logits.shape[:2] == mask.shape:
            mine, wanted_logits = mine[mask], wanted_logits[mask]
        np.testing.assert_allclose(mine, wanted_logits, atol=1e-4, rtol=1e-4)
    if kind == "token_classification":  # int8 and fp32 agree on words; padding does not count
        int8 = onnxruntime.InferenceSession(folder / "onnx" / "model_quantized.onnx")
        rows = LabelledRows(open_shards(shards, "validation"))
        ids = rows.shards.rows(np.arange(len(rows.ids))).astype(np.int64)
        fed = {"input_ids": ids, "attention_mask": (ids != rows.special.pad).astype(np.int64)}
        one, other = (s.run(["logits"], fed)[0].argmax(-1) for s in (session, int8))
        same = (one == other)[rows.columns["tags"] != -100].mean()
        known = json.loads((folder / "onnx" / "export.json").read_bytes())
        (entry,) = [f for name, f in known["files"].items() if "quantized" in name]
        assert entry["agreement"] == pytest.approx(same)
    if kind == "classification":
        other_tasks_are_refused(tmp_path, folder, shards)


def test_validation_without_a_teacher_measures_what_needs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only training rows may have soft labels: validation then measures the labels."""
    shards = task_data.make(tmp_path, "classification")
    seen: list[list[Any]] = []

    def own(rows: Any, terms: Any, counts: Any) -> Measure:
        seen.append(terms)
        return Measure(rows, terms, lambda *_: {}, counts)

    monkeypatch.setattr(labelled_task, "own_terms", own)
    with_teacher: Any = SimpleNamespace(needs_teacher=True, over="", name="soft")
    labels = labels_term(0.25)
    task: Any = SimpleNamespace(logits=None, counts={})
    measure = labelled_task.LabelledTask.measure
    for terms in ([with_teacher, labels], [with_teacher]):
        measure(task, None, open_shards(shards, "validation"), terms, teacher=False)
    assert seen[0] == [labels]
    ((only,),) = seen[1:]
    assert (only.name, only.weight(0)) == (labels.name, 1.0)
