"""Check that fp16's loss scale continues exactly from its state as JSON.

Accelerate makes `torch.amp.GradScaler("cuda")` of `mixed_precision="fp16"`. The same class scales
on a CPU, where these tests use it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from data_prep.disk.replacing import replace_json

STEPS = 24
OVERFLOWS = (5, 6, 17)  # steps whose gradient is infinite
GROWTH = 4  # finite steps between two doublings


class Training:
    """Train a linear model with AdamW and a loss scale."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.randn(4, generator=generator).requires_grad_()
        self.optimizer = torch.optim.AdamW([self.weight], lr=0.1)
        self.scaler = new_scaler(growth_interval=GROWTH)

    def step(self, number: int) -> tuple[Tensor, float, int]:
        """Return (weights, scale, growth tracker) after an update; an overflow skips the update."""
        x = torch.arange(4.0) + number
        loss = (self.weight * x).square().sum()
        if number in OVERFLOWS:
            loss = loss * float("inf")
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        state = self.scaler.state_dict()
        return self.weight.detach().clone(), state["scale"], state["_growth_tracker"]


def new_scaler(**arguments: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **arguments)


def through_json(path: Path, scaler: torch.amp.GradScaler) -> torch.amp.GradScaler:
    """Return a scaler loaded from JSON, as from state.json, over default arguments."""
    replace_json(path, {"scaler": scaler.state_dict()})
    again = new_scaler()
    again.load_state_dict(json.loads(path.read_text(encoding="utf-8"))["scaler"])
    return again


def run(after_step: Callable[[int, Training], None]) -> list[tuple[Tensor, float, int]]:
    training, history = Training(), []
    for number in range(STEPS):
        history.append(training.step(number))
        after_step(number, training)
    return history


def test_the_scale_rises_and_falls_in_these_steps() -> None:
    """Check that 4 finite steps double the scale, an overflow halves it."""
    history = run(lambda number, training: None)
    scales = [scale / 65536 for _, scale, _ in history]
    assert scales[:12] == [1, 1, 1, 2, 2, 1, 0.5, 0.5, 0.5, 0.5, 1, 1]
    assert [tracker for _, _, tracker in history[:12]] == [1, 2, 3, 0, 1, 0, 0, 1, 2, 3, 0, 1]
    for number in range(1, STEPS):
        unchanged = torch.equal(history[number][0], history[number - 1][0])
        assert unchanged == (number in OVERFLOWS), number


@pytest.mark.parametrize("resumed", [range(STEPS), (4,), (5,), (6,), (2, 16, 17, 20)])
def test_a_restored_scaler_continues_exactly(tmp_path: Path, resumed: range | tuple[int]) -> None:
    undisturbed = run(lambda number, training: None)

    def resume(number: int, training: Training) -> None:
        if number in resumed:
            training.scaler = through_json(tmp_path / "state.json", training.scaler)

    disturbed = run(resume)
    for (ours, *state), (theirs, *expected) in zip(disturbed, undisturbed, strict=True):
        assert torch.equal(ours, theirs) and state == expected


def test_a_scaler_that_is_not_restored_does_not() -> None:
    def forget(number: int, training: Training) -> None:
        if number == 6:
            training.scaler = new_scaler(growth_interval=GROWTH)

    scales = [[scale for _, scale, _ in run(after)] for after in (forget, lambda *_: None)]
    assert scales[0][:7] == scales[1][:7] and scales[0][7:] != scales[1][7:]


def test_a_scaler_that_has_not_scaled_yet_can_be_saved(tmp_path: Path) -> None:
    """Save the scaler of a run that is interrupted before its first step."""
    fresh = new_scaler(init_scale=1024, growth_interval=GROWTH)
    again = through_json(tmp_path / "state.json", fresh)
    assert again.state_dict() == fresh.state_dict()
    assert again.scale(torch.ones(())).item() == 1024


@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled:UserWarning")
def test_accelerates_scaler_is_of_this_class() -> None:
    from accelerate.utils import get_grad_scaler

    assert type(get_grad_scaler()) is torch.amp.GradScaler
