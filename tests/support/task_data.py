"""Write tiny labelled data of every task, and models with the head for it."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

import torch
from support.tiny import SPECIAL, VOCAB_SIZE, VOCABULARY
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from data_prep.examples.examples_config import ExamplesConfig
from data_prep.examples.making import make_examples
from pretrain.model.families import FAMILIES

WORDS = VOCABULARY[len(SPECIAL) :]
CLASSES = {
    "classification": AutoModelForSequenceClassification,
    "regression": AutoModelForSequenceClassification,
    "token_classification": AutoModelForTokenClassification,
    "question_answering": AutoModelForQuestionAnswering,
}
TAGS = ("O", "B-X", "I-X")
TASK = {"regression": "classification"}  # of the runs on a kind of examples


def sentence(draw: random.Random, longest: int = 12) -> str:
    """Draw a text of words of the vocabulary, each one token."""
    return " ".join(draw.choices(WORDS, k=draw.randint(3, longest)))


def write_data(folder: Path, kind: str, num: int = 96, seed: int = 0) -> Path:
    """Write `num` examples of a kind; return the file."""
    draw = random.Random(seed)
    if kind in ("classification", "regression"):
        path = folder / f"{kind}-{seed}.csv"
        with path.open("w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["text", "other", "label"])
            for _ in range(num):
                first, second = sentence(draw), sentence(draw)
                label = round(draw.random() * 5, 2) if kind == "regression" else draw.choice("abc")
                rows.writerow([first, second, label])
        return path
    path = folder / f"{kind}-{seed}.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number in range(num):
            if kind == "token_classification":
                words = sentence(draw).split()
                record: dict[str, Any] = {"tokens": words, "tags": draw.choices(TAGS, k=len(words))}
            else:
                context = sentence(draw, 30)
                words = context.split()
                begin = draw.randrange(len(words) - 1)
                text = " ".join(words[begin : begin + draw.randint(1, 2)])
                start = len(" ".join(words[:begin])) + bool(begin)
                answers = {"text": [text], "answer_start": [start]}
                record = {
                    "id": f"q{number}",
                    "question": sentence(draw, 5),
                    "context": context,
                    "answers": answers,
                }
            file.write(json.dumps(record) + "\n")
    return path


def texts_of(path: Path) -> list[tuple[str, ...]]:
    """Return the text or texts of each example of a file that `write_data` wrote."""
    if path.suffix == ".csv":
        with path.open(encoding="utf-8", newline="") as file:
            return [(row["text"], row["other"]) for row in csv.DictReader(file)]
    records = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [
        (" ".join(r["tokens"]),) if "tokens" in r else (r["question"], r["context"])
        for r in records
    ]


def settings(folder: Path, kind: str, **changes: Any) -> dict[str, Any]:
    """Write data and a vocabulary; return the file of the data."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n", encoding="utf-8")
    columns: dict[str, Any] = {"name": kind}
    if kind in ("classification", "regression"):
        columns["pair"] = "other"
    values: dict[str, Any] = {
        "output": str(folder / "shards"),
        "task": columns,
        "train": str(write_data(folder, kind)),
        "validation": str(write_data(folder, kind, 24, 1)),
        "tokenizer": str(folder / "vocab.txt"),
        "max_length": 64,
        "stride": 8,
    }
    return values | changes


def make(folder: Path, kind: str, **changes: Any) -> Path:
    """Make the shards of a task; return their folder."""
    values = settings(folder, kind, **changes)
    make_examples(ExamplesConfig.model_validate(values), lambda text: None)
    return Path(values["output"])


@torch.no_grad()
def save_model(folder: Path, family: str, kind: str, *, seed: int = 0, **changes: Any) -> Any:
    """Write a tiny model with a head for a kind, without dropout, and its vocabulary."""
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 80,
    }
    sizes |= {name: changes.pop(name) for name in sizes if name in changes}
    known = FAMILIES[family]
    config = known.new_config({**sizes, **known.rates(0.0, 0.0)}, {"pad": 0, "cls": 2, "sep": 3})
    for key in ("classifier_dropout", "seq_classif_dropout", "qa_dropout"):
        setattr(config, key, 0.0)
    if kind == "regression":
        config.num_labels = 1
        config.problem_type = "regression"
    elif kind != "question_answering":
        names = list(TAGS) if kind == "token_classification" else ["a", "b", "c"]
        config.id2label = dict(enumerate(sorted(names)))
        config.label2id = {name: i for i, name in config.id2label.items()}
    for key, value in changes.items():
        setattr(config, key, value)
    model = CLASSES[kind].from_config(config).eval()
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=draw)
        one = float(name.lower().endswith("norm.weight"))
        parameter.copy_(0.2 * noise if parameter.dim() > 1 else 0.1 * noise + one)
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n", encoding="utf-8")
    texts = {"tokenizer_class": "BertTokenizer", "do_lower_case": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(texts), encoding="utf-8")
    return model


def run_of(folder: Path, kind: str, **changes: Any) -> dict[str, Any]:
    """Return the settings of a run on a kind's examples."""
    values: dict[str, Any] = {
        "output": str(folder / "run"),
        "shards": str(folder / "shards"),
        "task": {"name": TASK.get(kind, kind)},
        "objective": {"name": "finetune"},
        "optimizer": {
            "learning_rate": 1e-3,
            "max_grad_norm": 1.0,
            "warmup_ratio": 0.1,
            "weight_decay": 0.0,
        },
        "train": {
            "max_steps": 20,
            "global_batch_size": 12,
            "micro_batch_size": 4,
            "precision": "fp32",
            "num_workers": 0,
        },
        "evaluation": {"every": 0, "rows": 24},
        "checkpoint": {"every": 0},
        "logging": {"every": 1},
    }
    for section, change in changes.items():
        known = values.get(section)
        both = isinstance(known, dict) and isinstance(change, dict)
        values[section] = {**known, **change} if both else change
    return values
