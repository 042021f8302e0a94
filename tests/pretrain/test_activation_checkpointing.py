"""Check activation checkpointing: identical gradients, in less memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import rank_work, ranks
from support.results import history, weights

from pretrain.config import RunConfig
from pretrain.train import train

Make = Callable[..., Any]
Settings = Callable[..., dict[str, Any]]


@pytest.fixture
def settings(teacher_folder: Path, make_settings: Settings) -> Settings:
    return make_settings(
        teacher_folder,
        student={"num_layers": 2},
        train={"max_steps": 4, "global_batch_size": 8, "micro_batch_size": 2},
        evaluation={"every": 2},
        checkpoint={"every": 2},
    )


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    ours, theirs = weights(one, 4), weights(other, 4)
    assert ours.keys() == theirs.keys() and history(one) == history(other)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_run_is_identical_and_may_switch_when_resumed(settings: Settings) -> None:
    usual, changed = settings("usual"), settings("changed", activation_checkpointing=True)
    train(RunConfig.model_validate(usual))
    train(RunConfig.model_validate(changed), stop_after=2)
    changed["train"]["activation_checkpointing"] = False
    train(RunConfig.model_validate(changed), stop_after=3)
    changed["train"]["activation_checkpointing"] = True
    train(RunConfig.model_validate(changed))
    assert_same(usual, changed)


def test_two_processes_train_the_same_with_it(settings: Settings) -> None:
    usual, less = settings("usual"), settings("less", activation_checkpointing=True)
    for values in (usual, less):
        ranks.run(2, rank_work.once, values)
    assert_same(usual, less)
