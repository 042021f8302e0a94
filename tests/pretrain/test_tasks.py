"""Train and distil tasks, and compare with plain loops of transformers and with formulas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import runs, task_data
from support.results import losses
from torch.nn.functional import cross_entropy, mse_loss

from data_prep.shards import open_shards
from pretrain.data.order import Order
from pretrain.tasks.labelled import LabelledRows

KINDS = ("classification", "regression", "token_classification", "question_answering")
FAMILIES = ("bert", "distilbert", "roberta", "modernbert")
TASK = {"regression": "classification"}  # of the runs on a kind of examples


def run_of(folder: Path, kind: str, **changes: Any) -> dict[str, Any]:
    """Return the settings of a run on a kind's examples."""
    values: dict[str, Any] = {
        "output": str(folder / "run"),
        "shards": str(folder / "shards"),
        "task": {"name": TASK.get(kind, kind)},
        "objective": {"name": "finetune"},
        "optimizer": {"learning_rate": 1e-3, "max_grad_norm": 1.0, "warmup_ratio": 0.1},
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


def no_dropout(folder: Path) -> dict[str, Any]:
    return {
        "init": str(folder),
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }


def plain_losses(model: Any, values: dict[str, Any], kind: str) -> list[float]:
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
        if getattr(model.config, "type_vocab_size", 0) > 1:
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_twenty_steps_equal_a_plain_loop(tmp_path: Path, kind: str, family: str) -> None:
    task_data.make(tmp_path, kind)
    model = task_data.save_model(tmp_path / "model", family, kind)
    values = run_of(tmp_path, kind, model=no_dropout(tmp_path / "model"))
    runs.start(values)
    assert [*losses(values).values()] == pytest.approx(plain_losses(model, values, kind), rel=1e-5)
