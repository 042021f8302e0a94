"""Compare the memory of a plan, a closed form, with what torch's allocator counts of real steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.bench.micro_step import Step, random_models, rows_of
from pretrain.config import RunConfig
from pretrain.contracts.terms import DISTILBERT_NAMES, Sizes
from pretrain.device.footprint import Footprint
from pretrain.device.memory import allocated
from pretrain.model.architectures import student_sizes
from pretrain.model.families import FAMILIES
from pretrain.plan import Planned, parameters

WORDS, LENGTH = 4000, 128
SIZES = {
    "hidden_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 768,
}


def config(folder: Path, family: str, length: int = LENGTH, **sections: Any) -> RunConfig:
    special = {"pad": 0, "cls": 101, "sep": 102}
    sizes = {**SIZES, "vocab_size": WORDS, "max_position_embeddings": length}
    FAMILIES[family].new_config(sizes, special).save_pretrained(folder / "teacher")
    values: dict[str, Any] = {
        "output": folder / "run",
        "shards": folder / "none",
        "teacher": str(folder / "teacher"),
        "student": {"architecture": "same", "dropout": 0.1, "attention_dropout": 0.1},
        "train": {"precision": "fp32"},
        **sections,
    }
    values["train"] |= {"micro_batch_size": 8, "global_batch_size": 8}
    return RunConfig.model_validate(values)


def planned(run: RunConfig, family: str, length: int = LENGTH) -> Footprint:
    teacher = Sizes(family, *SIZES.values())
    rows = Planned(8, 8 * length, length, WORDS)
    return Footprint(
        run,
        student_sizes(run.student, teacher),
        teacher,
        rows,
        "cpu",
    )


@pytest.mark.parametrize(
    ("family", "objective", "train"),
    [
        ("bert", {"name": "distilbert"}, {}),
        ("bert", {"name": "distilbert"}, {"precision": "bf16"}),
        ("bert", {"name": "minilm"}, {"precision": "fp32"}),
        ("roberta", {"name": "tinybert"}, {"precision": "bf16"}),
        ("roberta", {"name": "distilbert", "kl_positions": "masked"}, {}),
        ("modernbert", {"name": "embedding"}, {"precision": "bf16"}),
        ("bert", {"name": "embedding"}, {"activation_checkpointing": True}),
    ],
)
def test_a_plan_agrees_with_the_allocator_within_a_quarter(
    family: str, objective: dict[str, Any], train: dict[str, Any], tmp_path: Path
) -> None:
    """Count weights, gradients, AdamW's moments and a second micro-batch of 8 rows."""
    settings = {"precision": "fp32", **train}
    run = config(tmp_path, family, objective=objective, train=settings)
    plan, models = planned(run, family), random_models(run)
    step = Step(run, models, rows_of(run, models.student), torch.device("cpu"))
    step()  # makes the gradients
    trained = [p for p in step.module.parameters() if p.grad is not None]
    moments = sum(8 * p.numel() for p in trained)
    gradients = sum(p.grad.nbytes for p in trained if p.grad is not None)
    peak, _ = allocated(step, torch.device("cpu"))
    real = step.weights + gradients + moments + peak
    estimate = sum(plan.held.values()) + plan.micro_step(8, held=True)
    assert estimate == pytest.approx(real, rel=0.25)
    assert plan.micro_step(8, held=True) == pytest.approx(peak, rel=0.35)


@pytest.mark.parametrize("family", ["bert", "distilbert", "roberta", "modernbert"])
def test_parameters_are_those_of_a_model(family: str) -> None:
    kind = FAMILIES[family]
    sizes = {DISTILBERT_NAMES[n]: v for n, v in SIZES.items()} if family == "distilbert" else SIZES
    values: dict[str, Any] = {**sizes, "vocab_size": WORDS, "max_position_embeddings": LENGTH}
    with torch.device("meta"):
        found = kind.architecture(kind.new_config(values, {"pad": 0, "cls": 1, "sep": 2}))
    num = sum(p.numel() for p in found.parameters())
    rows = Planned(1, 1, LENGTH, WORDS)
    assert parameters(Sizes(family, *SIZES.values()), rows, head=True) == pytest.approx(
        num, rel=2e-3
    )


@pytest.mark.parametrize(
    ("family", "objective", "within"),
    [("bert", "distilbert", 0.25), ("roberta", "minilm", 0.3), ("modernbert", "embedding", 0.35)],
)
def test_a_plan_knows_that_long_rows_have_pairs_of_tokens(
    family: str, objective: str, within: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Take two rows of 1,024 tokens, whose attention keeps more than their hidden states."""
    monkeypatch.setattr("pretrain.bench.micro_step.LENGTH", 1024)
    train = {"precision": "bf16"}
    run = config(tmp_path, family, 1024, objective={"name": objective}, train=train)
    run = run.with_train(micro_batch_size=2, global_batch_size=2)
    models = random_models(run)
    step = Step(run, models, rows_of(run, models.student), torch.device("cpu"))
    step()
    peak, _ = allocated(step, torch.device("cpu"))
    assert planned(run, family, 1024).micro_step(2, held=True) == pytest.approx(peak, rel=within)


def test_a_plan_knows_the_gradient_of_a_large_vocabulary(tmp_path: Path) -> None:
    run = config(tmp_path, "roberta", objective={"name": "embedding"})
    rows = Planned(8, 8 * LENGTH, LENGTH, 250_000)
    sizes = Sizes("roberta", *SIZES.values())
    plan = Footprint(run, student_sizes(run.student, sizes), sizes, rows, "cpu")
    assert plan.micro_step(1, held=True) >= 250_000 * SIZES["hidden_size"] * 4


def test_what_takes_less_is_planned_with_less(tmp_path: Path) -> None:
    def step(**objective: Any) -> int:
        train = {"precision": "fp32", **objective.pop("train", {})}
        run = config(tmp_path, "bert", objective={"name": "distilbert", **objective}, train=train)
        return planned(run, "bert").micro_step(64, held=True)

    whole = step()
    assert step(kl_positions="masked") <= whole
    assert step(train={"precision": "bf16"}) < 0.8 * whole
    assert step(train={"activation_checkpointing": True}) < 0.6 * whole
