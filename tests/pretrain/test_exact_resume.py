"""Check that a run resumed after any step is bitwise identical to the undisturbed run."""

import os
from pathlib import Path
from typing import Any

import pytest
from support import rank_work, ranks
from support.runs import history

FEW = [1, 10, 11]  # the first epoch ends in step 11
ALL = list(range(1, 21))
LONG, LAYOUTS = FEW, [(3, 2, 2), (4, 1, 0)]
if os.environ.get("DISTIL_TORTURE"):  # `make torture` sets it
    LONG, LAYOUTS = ALL, [(3, 1, 2), (3, 2, 0), *LAYOUTS, (4, 2, 2)]


@pytest.fixture
def settings(tmp_path: Path, run_config: Any, teacher_folder: Path) -> dict[str, Any]:
    """Return 21 steps of 24 rows with dropout over more than one epoch, a checkpoint at each."""
    return run_config(
        tmp_path / "run",
        teacher_folder,
        student={"num_layers": 2, "dropout": 0.1, "attention_dropout": 0.1},
        optimizer={"learning_rate": 1e-3},
        train={"max_steps": 21, "global_batch_size": 24},
        checkpoint={"every": 1, "keep": 100},
    )


def resumed(
    settings: dict[str, Any], world: int, steps: list[int], control: str = "", stage: int = 0
) -> list[int]:
    """Return the steps after which a resumed run differs from the undisturbed one."""
    ranks.run(world, rank_work.resumes, settings, steps, control, environment=ranks.zero(stage))
    whole = Path(settings["output"])
    differing = []
    for step in steps:
        one = whole.with_name(f"{whole.name}-from-{step}")
        if result(one, step + 1) != result(whole, step + 1):
            differing.append(step)
    return differing


def result(output: Path, step: int) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Return the checksums and the metrics of a step."""
    metrics = [entry for entry in history(output) if entry["step"] == step]
    return ranks.digests(output, step), metrics


@pytest.mark.parametrize(
    ("world", "accumulation", "workers", "steps"),
    [
        *((*layout, FEW) for layout in ((1, 2, 2), (3, 1, 0))),
        pytest.param(1, 1, 0, ALL, marks=pytest.mark.slow),
        *(pytest.param(*layout, LONG, marks=pytest.mark.slow) for layout in LAYOUTS),
    ],
    ids=lambda value: f"{len(value)}_steps" if isinstance(value, list) else None,
)
def test_a_resume_at_each_step_is_bitwise(
    settings: dict[str, Any], world: int, accumulation: int, workers: int, steps: list[int]
) -> None:
    micro = 24 // (world * accumulation)
    settings["train"] |= {"micro_batch_size": micro, "num_workers": workers}
    settings["train"]["max_steps"] = steps[-1] + 1
    assert resumed(settings, world, steps) == []


@pytest.mark.slow
@ranks.needs_deepspeed
@pytest.mark.parametrize("stage", [1, 2])
def test_a_resume_under_zero_is_bitwise(settings: dict[str, Any], stage: int) -> None:
    settings["train"] |= {"micro_batch_size": 4}
    assert resumed(settings, 3, [3, 9, 15], stage=stage) == []


@pytest.mark.parametrize(
    ("control", "world"),
    [("dropout is not reseeded", 1), ("buckets are not warmed up", 3), ("masks have no key", 1)],
)
def test_a_resume_differs_without_each_measure_that_makes_it_exact(
    settings: dict[str, Any], control: str, world: int
) -> None:
    settings["train"] |= {"micro_batch_size": 24 // world}
    settings["train"] |= {"max_steps": 4}
    assert resumed(settings, world, [3], control) == [3]
