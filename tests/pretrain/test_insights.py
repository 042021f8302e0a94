"""Compare the losses of the BERT-Insights study with their formula; train each of its points."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import runs, task_data
from support.results import losses
from support.runs import step_folder
from support.shipped import CONFIGS
from support.task_data import run_of
from torch.nn.functional import layer_norm, log_softmax, mse_loss, softmax

from launch.config import load_config
from launch.recipe_config import Recipe
from pretrain import RunError
from pretrain.contracts.batch import PLACES, Batch
from pretrain.contracts.terms import Encoded, Shape, Signal
from pretrain.objectives.insights import Insights

SEVEN = [
    dict(zip(("logits", "hidden", "embedding"), on, strict=True))
    for on in [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (1, 0, 1), (0, 1, 1), (1, 1, 1)]
]


@pytest.mark.parametrize("on", SEVEN)
def test_each_loss_is_its_formula(on: dict[str, int]) -> None:
    """Two examples in a packed row, and one that was left out; 2 layers learn from 3 and 1."""
    draw = torch.Generator().manual_seed(3)
    hidden = torch.randn(2, 5, 1, 9, 4, generator=draw, dtype=torch.float64)  # [model, layer + 1]
    logits = torch.randn(2, 3, 3, generator=draw, dtype=torch.float64)  # [model, example, class]
    places = torch.tensor([[0, 1, 2, 3], [4, 5, 6, -1], [-1, -1, -1, -1]])
    classes = torch.tensor([2, 0, -100])
    expected = torch.zeros(())
    for example in (0, 1):
        own = places[example][places[example] >= 0]
        s, t = logits[:, example]
        distances = []
        if on["logits"]:  # the study's cross-entropy, without the teacher's entropy
            p = softmax(t, -1)
            distances.append((p * (p.log() - log_softmax(s, -1))).sum())
        pairs = [(1, 4), (2, 2)] * on["hidden"] + [(0, 0)] * on["embedding"]
        for ours, theirs in pairs:
            x, y = hidden[0, ours, 0, own], hidden[1, theirs, 0, own]
            distances.append(mse_loss(layer_norm(x, x.shape), layer_norm(y, y.shape)))
        expected = expected - log_softmax(s, -1)[classes[example]]
        expected = expected + sum(distances) / len(distances)
    objective = Insights.model_validate({**on, "layers": (3, 1)})
    models = [
        Encoded(torch.zeros(0), {Signal("hidden", i - 1): x for i, x in enumerate(h)}, z)
        for h, z in zip(hidden, logits, strict=True)
    ]
    nothing = torch.zeros(0)
    labels = {PLACES: places, "label": classes, "teacher_logits": logits[1]}
    batch = Batch(nothing, nothing, 0, labels, {}, np.zeros((0, 2), np.int64))
    terms: Any = objective.terms(Shape(2, 4, 2), Shape(4, 4, 2))
    found = sum(t.weight(0) * t.total(*models, batch, torch.nn.ModuleDict()) for t in terms)
    assert found.item() == pytest.approx(expected.item(), rel=1e-9)


def test_layers_and_widths_that_do_not_fit_are_refused() -> None:
    every = Insights(hidden=True, layers=(0, 3))
    with pytest.raises(RunError, match="has 2 layers, and the student has 3"):
        every.check(Shape(3, 4, 2), Shape(4, 4, 2))
    with pytest.raises(RunError, match="3: the teacher has layers 0 to 2"):
        every.check(Shape(2, 4, 2), Shape(3, 4, 2))
    with pytest.raises(RunError, match=r"student\.hidden_size: 8"):
        every.check(Shape(2, 4, 2), Shape(4, 8, 2))
    with pytest.raises(ValueError, match="all off"):
        Insights(layers=(0,))


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_points_of_the_shipped_grid_train(tmp_path: Path, every: bool) -> None:
    """Take each run's keys, at tiny size; no student has a tensor of its teacher's memory."""
    trained = [(1, 1, 1), (1, 0, 0)]  # with hidden states or without; the test above has all sums
    recipe = load_config(Recipe, CONFIGS / "insights-grid.yaml")
    sweeps = [entry for entry in recipe.runs if entry.stage == "sweep"]
    assert [len(entry.sweep) for entry in sweeps] == [3, 105, 105, 105, 105]
    task_data.make(tmp_path, "classification")
    task_data.save_model(tmp_path / "model", "bert", "classification", num_hidden_layers=12)
    base = run_of(tmp_path, "classification", teacher=str(tmp_path / "model"))
    seen = set()
    for entry in sweeps[1:]:
        for label, run in entry.sweep.items():
            if not label.startswith("cola-seed0"):
                continue
            objective = run.objective.model_dump()
            assert objective["layers"] == run.student.init and len(objective["layers"]) == 4
            point = tuple(objective[k] for k in SEVEN[0])
            seen.add((objective["layers"], point))
            # Each choice of layers with all losses, and one with each sum.
            if not all(point) and entry.output.name != "even":
                continue
            if not (every or point in trained):
                continue
            student = {"architecture": "same", "init": run.student.init}
            values = base | {"objective": objective, "student": student}
            values["output"] = str(tmp_path / f"{entry.output.name}-{label}")
            runs.start(values, stop_after=1)
            assert math.isfinite(losses(values)[1])
            assert step_folder(values["output"], 1).exists()
    assert len(seen) == 28
