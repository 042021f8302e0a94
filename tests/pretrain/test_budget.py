"""Compare memory counted by shapes with what real steps hold, and the counts with a run's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.allocator import allocated_peak
from support.runs import start
from support.said import Said

from pretrain import checkpoint
from pretrain.bench import models
from pretrain.bench.budget import Budget
from pretrain.config import RunConfig
from pretrain.device.precision import PRECISIONS
from pretrain.model.distillation import Distillation
from pretrain.model.families import shape_of
from pretrain.plan import Planned, Sizes, plan
from pretrain.run import build_optimizer

TEACHER = Sizes("bert", 128, 4, 2, 512)
STUDENT = Sizes("distilbert", 128, 2, 2, 512)
ROWS = Planned(100, 100 * 128, 128, 4000)
SIZES = models.Sizes(width=128, layers=4, vocabulary=4000, length=128)


def config(precision: str, **sections: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "output": "run",
            "shards": "shards",
            "teacher": "teacher",
            "train": {"precision": precision},
            **sections,
        }
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kl_positions", ["all", "masked"])
def test_live_bytes_are_those_of_torch_s_profiler(precision: str, kl_positions: str) -> None:
    """Compare a whole step: two micro-batches of 4 rows, then AdamW."""
    run = config(precision, objective={"name": "distilbert", "kl_positions": kl_positions})
    counted = Budget(run, STUDENT, TEACHER, ROWS, "cpu")
    student, teacher = models.models(SIZES)
    teacher.to(PRECISIONS[precision].dtype)  # type: ignore[arg-type]
    shapes = shape_of(student), shape_of(teacher)
    module = Distillation(student, teacher, run.objective.terms(*shapes), pad_id=models.PAD)
    optimizer = build_optimizer(module, run.optimizer, torch.device("cpu"))
    special = models.SpecialIds(models.PAD, models.CLS, models.SEP)
    documents = [[one] for one in models.drawn([128] * 4, 4000, special)]
    batch = models.batch(documents, 128, models.masking(SIZES), special)
    batch = batch.to(torch.device("cpu"))

    def step() -> None:
        for _ in range(2):
            with PRECISIONS[precision].autocast(torch.device("cpu")):
                loss, _ = module(batch, torch.ones(3))
            (loss / 1000).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # makes AdamW's moments
    weights = [*student.parameters(), *teacher.parameters()]
    moments = [t for state in optimizer.state.values() for t in state.values()]
    held = sum({id(t): t.numel() * t.element_size() for t in [*weights, *moments]}.values())
    real = held + allocated_peak(step)
    total = sum(counted.held.values()) + counted.micro_step(4, held=True)
    assert total == pytest.approx(real, rel=0.15)
    assert counted.held["AdamW"] == pytest.approx(sum(t.nbytes for t in moments), rel=0.01)


def test_more_rows_and_all_positions_take_more() -> None:
    masked = Budget(
        config("bf16", objective={"name": "distilbert", "kl_positions": "masked"}),
        *(STUDENT, TEACHER, ROWS, "cuda"),
    )
    everywhere = Budget(config("bf16"), STUDENT, TEACHER, ROWS, "cuda")
    assert masked.micro_step(64, held=True) < everywhere.micro_step(64, held=True)
    assert masked.micro_step(32, held=True) < 0.6 * masked.micro_step(64, held=True)
    again = config("bf16", train={"precision": "bf16", "activation_checkpointing": True})
    less = Budget(again, STUDENT, TEACHER, ROWS, "cuda")
    assert less.micro_step(64, held=True) < everywhere.micro_step(64, held=True)


@pytest.mark.parametrize("objective", ["distilbert", "minilm", "tinybert", "mlm"])
def test_trained_parameters_are_those_of_a_run(
    objective: str,
    tmp_path: Path,
    teacher_folder: Path,
    run_config: Callable[..., dict[str, Any]],
) -> None:
    values = run_config(
        tmp_path / "run",
        teacher_folder,
        objective={"name": objective},
        train={"max_steps": 1, "global_batch_size": 2},
    )
    if objective == "mlm":
        del values["teacher"]
        values["model"] = {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
        }
    elif objective in ("minilm", "tinybert"):
        values["student"] = {"architecture": "same"}
    start(values, progress=Said())
    saved = checkpoint.newest(tmp_path / "run" / "checkpoints", print)
    assert saved is not None
    moments = saved.optimizer()
    found = plan(RunConfig.model_validate(values), {}, needs_shards=True)
    assert found.student is not None and found.rows is not None
    counted = Budget(
        RunConfig.model_validate(values), found.student, found.teacher, found.rows, "cpu"
    )
    # The models here have more positions than a row has tokens, which matters at this size only.
    others = sum(t.nbytes for name, t in moments.items() if "position_embeddings" not in name)
    positions = found.rows.row_length * found.student.hidden_size
    assert 8 * (counted.trained - positions) == pytest.approx(others, rel=1e-3)
    assert (counted.teacher > 0) == (objective != "mlm")


@pytest.mark.parametrize(
    ("objective", "task"),
    [
        ({"name": "distilbert"}, "mlm"),
        ({"name": "minilm"}, "mlm"),
        ({"name": "embedding"}, "embedding"),
        ({"name": "pkd"}, "classification"),
        ({"name": "theseus", "steps": 3}, "classification"),
    ],
    ids=lambda case: case["name"] if isinstance(case, dict) else "",
)
@pytest.mark.parametrize("family", ["bert", "distilbert", "roberta", "modernbert"])
def test_a_step_of_each_family_is_counted(
    family: str, objective: dict[str, Any], task: str
) -> None:
    """Without dropout a GPU keeps at least each layer's input for the backward pass."""
    run = config(
        "bf16",
        objective=objective,
        task={"name": task},
        student={"architecture": "same", "dropout": 0.0, "attention_dropout": 0.0},
    )
    sizes = Sizes(family, 128, 2, 2, 512), Sizes(family, 128, 4, 2, 512)
    few = Planned(100, 1280, 128, 11)  # a vocabulary of DNA
    counted = Budget(run, *sizes, few, "cuda")
    assert counted.micro_step(32, held=True) > 2 * 32 * 128 * 128 * 2
    assert counted.trained > 0 and counted.teacher > counted.trained
